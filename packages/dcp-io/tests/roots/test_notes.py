"""Notes beside a checkpoint: valid JSON whatever the metrics are, and one odd value costs only itself."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_io import LocalStore
from dcp_io.roots.copy_notes import CopyNote
from dcp_io.roots.records import Note
from dcp_io.saves.save_files import this_process

NOTE = Note(3, 5.0, {"loss": 0.1, "accuracy": 2.0}, this_process(), "digest")
ODD = [None, "n/a", [1.0, 2.0], {"a": 1}, 10**400, [[]], "1.5"]


def only_json(data: bytes) -> Any:
    return json.loads(data, parse_constant=pytest.fail)


@given(st.dictionaries(st.text(), st.floats()))
def test_any_float_is_valid_json_and_comes_back(metrics: dict[str, float]) -> None:
    data = Note(1, 0.0, metrics, None).to_bytes()
    only_json(data)
    found = Note.from_bytes(data)
    assert found is not None
    assert {name: repr(value) for name, value in found.metrics.items()} == {n: repr(v) for n, v in metrics.items()}


def test_nan_as_earlier_versions_wrote_it_is_read() -> None:
    found = Note.from_bytes(b'{"step": 1, "created": 2, "metrics": {"a": NaN, "b": -Infinity, "c": 1}}')
    assert found is not None
    assert math.isnan(found.metrics["a"])
    assert found.metrics["b"] == -math.inf
    assert found.metrics["c"] == 1


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("field", ["step", "created", "metrics", "process", "replaces", "a metric", "missing"])
def test_one_odd_value_costs_only_itself(field: str, odd: Any) -> None:
    values = only_json(NOTE.to_bytes())
    if field == "a metric":
        values["metrics"]["val_loss"] = odd
    else:
        values[field] = odd
    found = Note.from_bytes(json.dumps(values).encode())
    assert found is not None
    kept = {
        "created": found.created_seconds == 5.0,
        "metrics": found.metrics == NOTE.metrics,
        "process": found.process == NOTE.process,
        "replaces": found.replaces == "digest",
    }
    kept.pop(field, None)
    assert all(kept.values()), kept


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("field", ["save_id", "hosts", "protected", "copies of another host"])
def test_an_odd_value_never_makes_copies_look_like_this_hosts_part(tmp_path: Any, field: str, odd: Any) -> None:
    store = LocalStore(tmp_path)
    CopyNote("id", {"a": ("__1.distcp",)}, ("a", "b"), protected=True).write(store)
    path = tmp_path / ".dcp-copies.json"
    values = json.loads(path.read_bytes())
    if field == "copies of another host":
        values["copies"]["b"] = odd
    else:
        values[field] = odd
    path.write_text(json.dumps(values))
    note = CopyNote.read(store)
    assert "__1.distcp" in note.names
    assert not note.protected
