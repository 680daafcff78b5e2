from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_core import load_keys, save
from dcp_core.state_dict.flatten import (
    flatten,
    is_empty_mapping,
    merge_paths,
    name_empty_mappings,
    restore_empty_mappings,
    unflatten_state_dict,
)
from dcp_manifest.index.literal_keys import LiteralKey
from integration_tests.kits.memory import MemoryReader, MemoryWriter

KEYS = st.sampled_from(["", ".", "a", "a.", "a.b", ".a", "..", "b"])
STATES = st.dictionaries(
    KEYS,
    st.recursive(st.just({}) | st.integers(0, 9), lambda values: st.dictionaries(KEYS, values, max_size=3)),
    max_size=4,
)
CLASHES: list[dict[Any, Any]] = [
    {"x.y": {}, "x": {"y": {"": 5}}},
    {"a": {"b": {}}, "a.b": {}},
    {"a": {"": {}}, "a.": {}},
    {"x": {"": {"": 5}, ".": {}}},
    {"a": {"b": {}}, "a.b": 5},
    {"a": {"b": {}}, "a.b": torch.ones(2)},
    {"a": {}, "b": [{}, {"c": {}}], "d": {"": {}}, 5: {6: {}}},
]


def clashes(state: dict[Any, Any]) -> bool:
    """Whether two values have one name, which is refused."""
    names: list[str] = []

    def collect(part: dict[Any, Any], prefix: str) -> None:
        for key, value in part.items():
            if isinstance(value, dict):
                collect(value, f"{prefix}{key}.")
            else:
                names.append(f"{prefix}{key}")

    collect(state, "")
    return len(names) != len(set(names))


@given(STATES)
def test_whatever_the_keys_the_nesting_comes_back(state: dict[str, Any]) -> None:
    if clashes(state):
        return
    flat = flatten(state)
    named = name_empty_mappings(flat)
    assert not named.keys() & flat.values.keys()
    paths = {**flat.paths, **named}
    assert {name for name, path in paths.items() if is_empty_mapping(name, path)} == named.keys()
    nested = unflatten_state_dict(flat.values, flat.paths)
    restore_empty_mappings(nested, paths)
    assert nested == state


@pytest.mark.parametrize("state", CLASHES, ids=str)
def test_names_that_meet(state: dict[Any, Any]) -> None:
    folder = uuid.uuid4().hex
    save(state, storage_writer=MemoryWriter(folder))
    found = load_keys(storage_reader=MemoryReader(folder))
    if "a.b" in state and isinstance(state["a.b"], torch.Tensor):
        assert torch.equal(found.pop("a.b"), torch.ones(2))
        state = {"a": {"b": {}}}
    assert found == state


def test_names() -> None:
    found = name_empty_mappings(flatten({"a": {}, "b": [{}, {"c": {}}], "d": {"": {}}, 5: {6: {}}}))
    assert found == {"a.": ("a",), "b.0.": ("b", 0), "b.1.c.": ("b", 1, "c"), "d..": ("d", ""), "5.6.": ("5", "6")}
    assert type(found["5.6."][1]) is LiteralKey


@pytest.mark.parametrize("swap", [False, True])
def test_names_that_meet_across_ranks(*, swap: bool) -> None:
    """One rank's empty mapping has the name of another rank's value, and of a third rank's empty mapping elsewhere."""
    states: list[dict[str, Any]] = [{"x.y": {}}, {"x": {"y": {"": 5}}}, {"x": {"y": {}}}, {"x.y": {}}]
    flats = [flatten(state) for state in (reversed(states) if swap else states)]
    merged = merge_paths([{**flat.paths, **name_empty_mappings(flat)} for flat in flats])
    nested = unflatten_state_dict({"x.y.": 5}, {"x.y.": merged["x.y."]})
    restore_empty_mappings(nested, merged)
    assert nested == {"x": {"y": {"": 5}}, "x.y": {}}
    assert len(merged) == 3


def test_an_empty_mapping_of_one_rank_leaves_what_another_has_there() -> None:
    nested = {"optimizer": {"w": 1}}
    restore_empty_mappings(nested, {"optimizer.w": ("optimizer", "w"), "optimizer.": ("optimizer",)})
    assert nested == {"optimizer": {"w": 1}}
