"""Calls with generated arguments: a few here, ten times as many under `slow`, any number by hand."""

from __future__ import annotations

import zipfile
from io import BytesIO

import numpy as np
import pytest

from dcp_core.objects.allowed_globals import allowed_globals, default_globals, default_table
from dcp_core.objects.object_bytes import load_object
from integration_tests.fuzz.argument_trees import nodes, pickle_of_tree
from integration_tests.fuzz.call_campaign import attempt, attempt_calls, forbidden, made_of, seeds

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = 400


@pytest.mark.parametrize(
    ("first", "count"), [(0, CASES), pytest.param(CASES, 9 * CASES, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_call_does_harm(first: int, count: int) -> None:
    assert attempt_calls(first, count) == []


def test_a_call_that_does_harm_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would show nothing."""
    leak = pickle_of_tree(forbidden()[1])
    assert attempt(leak, {}) is None
    monkeypatch.setitem(allowed_globals().table.calls, id(np.ndarray), lambda _, arguments: np.ndarray(*arguments))  # type: ignore[index]
    assert "gave away the address" in str(attempt(leak, {}))


def test_every_class_that_may_be_called_is_tried() -> None:
    trees, _ = seeds()
    named = {node.value for tree in trees for node in nodes(tree) if node.kind == "name"}
    calls = default_table().calls
    called = {name for name, value in default_globals().items() if id(value) in calls}
    rare = {
        *("bool", "int", "float", "str", "bytes", "list", "tuple", "dict"), "ndarray", "dtype", "TorchVersion",
        *(value.__name__ for value in set(np.sctypeDict.values())), "Parameter", "Path", "PurePath", "PosixPath",
        *("PurePosixPath", "PureWindowsPath", "WindowsPath", "BytesIO", "StringIO"),
    }  # fmt: skip
    assert {name for name in called - named if name.rpartition(".")[2] not in rare} == set()


def test_trees_that_are_not_changed_give_the_values_that_they_are_of() -> None:
    trees, records = seeds()
    for tree, value in zip(trees, made_of(), strict=False):
        data = BytesIO()
        with zipfile.ZipFile(data, "w") as file:
            file.writestr("archive/data.pkl", pickle_of_tree(tree))
            for name, content in records.items():
                file.writestr(name, content)
        assert repr(load_object(data.getvalue(), key="k")).split(" at 0x")[0] == repr(value).split(" at 0x")[0]
