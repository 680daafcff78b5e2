"""Keys of state dicts that are no strings."""

from __future__ import annotations

import enum
import uuid
import warnings
from typing import Any

import pytest
import torch

from dcp_core import UnsupportedValueError, load, load_keys, save
from integration_tests.kits.memory import MemoryReader, MemoryWriter


class Colour(enum.Enum):
    RED = 1


class Word(str, enum.Enum):
    A = "a"


class Name(str):
    __slots__ = ()


LITERAL_KEYS = [True, False, None, 0, -3, 10**30, 1.5, -0.0, 2j, b"x", (), (1, 2), ("a", (None, 2.5)), Name("n")]
TEXT_KEYS = [Colour.RED, Word.A, frozenset([1]), float("nan"), (1, Colour.RED), torch.float32]


def saved(state: dict[Any, Any]) -> str:
    folder = uuid.uuid4().hex
    save(state, storage_writer=MemoryWriter(folder))
    return folder


@pytest.mark.parametrize("key", LITERAL_KEYS, ids=repr)
def test_literals_come_back_as_they_were(key: object) -> None:
    state = {key: 1, "nested": {key: {"tensor": torch.ones(2)}}}
    folder = saved(state)
    found = load_keys(storage_reader=MemoryReader(folder))
    for part in (found, found["nested"]):
        (restored,) = (each for each in part if each != "nested")
        wanted = str if isinstance(key, str) else type(key)
        assert (type(restored), repr(restored)) == (wanted, repr(key))
    template: dict[Any, Any] = {key: 0, "nested": {key: {"tensor": torch.zeros(2)}}}
    load(template, storage_reader=MemoryReader(folder))
    assert template[key] == 1
    assert template["nested"][key]["tensor"].tolist() == [1, 1]


@pytest.mark.parametrize("key", TEXT_KEYS, ids=repr)
def test_others_are_found_by_a_template_and_warned_of(key: object) -> None:
    with pytest.warns(UserWarning, match=f"a key of class {type(key).__qualname__} .* load_keys") as caught:
        folder = saved({key: 1, "n": {key: torch.ones(2)}})
    assert len(caught) == 1  # once for a class, not for each key
    template: dict[Any, Any] = {key: 0, "n": {key: torch.zeros(2)}}
    load(template, storage_reader=MemoryReader(folder))
    assert template[key] == 1
    assert template["n"][key].tolist() == [1, 1]
    assert load_keys(storage_reader=MemoryReader(folder))[str(key)] == 1


def test_numbers_that_python_does_not_print_are_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="too many digits"):
        saved({10**10_000: 1})


def test_strings_are_never_read_as_literals() -> None:
    state = {"True": 1, "1.5": 2, "None": {"(1, 2)": torch.ones(1)}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_keys(storage_reader=MemoryReader(saved(state)))
    assert found == state
    assert all(type(key) is str for key in (*found, *found["None"]))
