"""Pickles that try to reach what they were not given. Whatever runs leaves a mark in `RAN`."""

from __future__ import annotations

import collections
import pickle
from typing import Any

import numpy as np
import pytest

from dcp_core.objects.allowed_globals import allowed_globals
from dcp_manifest.pickles.pickle_table import ForbiddenGlobalError, python3_name
from dcp_manifest.pickles.safe_pickle import read_pickle

RAN: list[object] = []
REFUSALS = ValueError


class Box:
    """A class that a caller has allowed."""

    def __init__(self, content: object = None) -> None:
        self.content = content

    def method(self) -> None:
        RAN.append("method")

    def __setitem__(self, key: object, value: object) -> None:
        RAN.append("setitem")

    append = extend = add = lambda self, value: RAN.append("items")


class Bag(dict[str, int]):
    """A container that a caller has allowed."""


class Row(list[int]):
    """Another one."""


def load(data: bytes) -> Any:
    allowed = allowed_globals([(Box, "here.Box"), Bag, Row, (7, "here.value")])
    return read_pickle(data, allowed.table)[0]


BOX = b"\x80\x02chere\nBox\n"
NEW_BOX = BOX + b")R"

REFUSED = {
    "unknown global": b"\x80\x02cos\nsystem\n.",
    "global under its Python 2 name": b"\x80\x02c__builtin__\neval\n.",
    "attribute of an allowed class": b"\x80\x04\x8c\x04here\x8c\x0aBox.method\x93.",
    "attribute through a module": b"\x80\x04\x8c\x08builtins\x8c\x08list.pop\x93.",
    "call of a value that may not be called": b"\x80\x02chere\nvalue\n" + BOX[2:] + b")R\x85R.",
    "call of what a call gave": NEW_BOX + b")R.",
    "call of a string": b"\x80\x02X\x04\x00\x00\x00eval)R.",
    "new object of something else": b"\x80\x02chere\nvalue\n)\x81.",
    "new object with keywords of something else": b"\x80\x04chere\nvalue\n)}\x92.",
    "old instance": b"(ihere\nBox\n.",
    "old object": b"(chere\nBox\no.",
    "extension code": b"\x80\x02\x82\x01.",
    "state for a function": b"\x80\x02chere\nvalue\n}b.",
    "state for a class": BOX + b"}X\x01\x00\x00\x00aK\x01sb.",
    "item into an object": NEW_BOX + b"K\x01K\x02s.",
    "items into an object": NEW_BOX + b"(K\x01K\x02u.",
    "append to an object": NEW_BOX + b"K\x01a.",
    "appends to an object": NEW_BOX + b"(K\x01e.",
    "additems to an object": b"\x80\x04" + NEW_BOX[2:] + b"(K\x01\x90.",
    "state for a list": b"\x80\x02]}X\x01\x00\x00\x00aK\x01sb.",
}


@pytest.mark.parametrize("trick", REFUSED)
def test_refused(trick: str) -> None:
    RAN.clear()
    with pytest.raises(REFUSALS):
        load(REFUSED[trick])
    assert RAN == []


def test_forbidden_globals_are_named() -> None:
    with pytest.raises(ForbiddenGlobalError) as caught:
        load(REFUSED["global under its Python 2 name"])
    assert caught.value.path == "builtins.eval"
    assert python3_name("copy_reg", "_reconstructor") == "copyreg._reconstructor"


@pytest.mark.parametrize("protocol", range(6))
def test_allowed_containers_take_their_items(protocol: int) -> None:
    """`allow_globals=[Bag]` is enough for what a `Bag` is pickled to."""
    bag, row = Bag(a=1, b=2), Row([1, 2, 3])
    if protocol < 2:
        with pytest.raises(ForbiddenGlobalError, match=r"copyreg\._reconstructor"):
            load(pickle.dumps([bag, row], protocol))
        return
    found = load(pickle.dumps([bag, row], protocol))
    assert found == [bag, row]
    assert [*map(type, found)] == [Bag, Row]


def test_allowed_calls_and_states() -> None:
    box = load(NEW_BOX + b"}X\x07\x00\x00\x00contentK\x05sb.")
    assert type(box) is Box
    assert box.content == 5
    assert load(b"\x80\x02ccollections\ndeque\n)R(K\x01K\x02e.") == collections.deque([1, 2])


class Raw:
    """Pickles as a call of a global with a state."""

    def __init__(self, function: Any, args: tuple[Any, ...], state: Any) -> None:
        self.reduced = (function, args, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


VOID_OF_POINTERS = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)

BAD_NUMPY: dict[str, Raw] = {
    "pointers in raw bytes": Raw(
        np.ndarray, ((0,), "b"), (1, (1,), Raw(np.dtype, ("V8",), VOID_OF_POINTERS), False, b"A" * 8)
    ),
    "objects from bytes": Raw(np.ndarray, ((0,), "b"), (1, (1,), np.dtype("O"), False, b"A" * 8)),
    "too few bytes": Raw(np.ndarray, ((0,), "b"), (1, (9,), np.dtype("f8"), False, b"A" * 8)),
    "too few objects": Raw(np.ndarray, ((0,), "b"), (1, (9,), np.dtype("O"), False, [1])),
    "negative shape": Raw(np.ndarray, ((0,), "b"), (1, (-1, -1), np.dtype("f8"), False, b"A" * 8)),
    "no dtype": Raw(np.ndarray, ((0,), "b"), (1, (1,), "f8", False, b"A" * 8)),
    "subarray of objects": Raw(np.dtype, ("V8",), (3, "|", (np.dtype("O"), (1,)), None, None, 8, 1, 0)),
    "fields beyond the item": Raw(np.dtype, ("V4",), (3, "|", None, ("a",), {"a": (np.dtype("f8"), 0)}, 4, 1, 0)),
}


@pytest.mark.parametrize("trick", BAD_NUMPY)
def test_numpy_states_are_checked(trick: str) -> None:
    with pytest.raises(REFUSALS):
        load(pickle.dumps(BAD_NUMPY[trick], 2))


def test_a_finished_dtype_replaces_its_earlier_self_everywhere() -> None:
    big = np.dtype(">i4")
    found = load(pickle.dumps([big, (big, big)], 2))
    assert found == [big, (big, big)]
    assert found[0] is found[1][0]
