from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dcp_core.lazy import LazyDict


class Source:
    def __init__(self) -> None:
        self.made: list[str] = []

    def __len__(self) -> int:
        return 3

    def make(self, key: object) -> list[str]:
        if key not in ("a", "b", "c"):
            raise KeyError(key)
        self.made.append(str(key))
        return [str(key)]

    def items(self) -> Iterator[tuple[str, list[str]]]:
        return ((key, self.make(key)) for key in ("a", "b", "c"))


WHOLE = {"a": ["a"], "b": ["b"], "c": ["c"]}


def test_looking_up_one_makes_one() -> None:
    source = Source()
    lazy = LazyDict(source)
    assert len(lazy) == 3
    assert lazy
    assert source.made == []
    assert lazy["b"] is lazy["b"]
    assert lazy.get("b") is lazy["b"]
    assert source.made == ["b"]
    assert lazy.get("x", 7) == 7
    assert "x" not in lazy
    assert "b" in lazy
    with pytest.raises(KeyError):
        lazy["x"]
    assert source.made == ["b"]


# Each must see the whole dict, in order, whatever was looked up before.
READS: list[Callable[[Any], Any]] = [
    dict,
    list,
    repr,
    copy.copy,
    copy.deepcopy,
    reversed,
    lambda d: {**d},
    lambda d: d | {"x": 1},
    lambda d: {"x": 1} | d,
    lambda d: list(d.items()),
    lambda d: list(d.keys()),
    lambda d: list(d.values()),
    lambda d: d.copy(),
    lambda d: pickle.loads(pickle.dumps(d)),
    lambda d: d == WHOLE,
    lambda d: d == WHOLE,
    lambda d: d != WHOLE,
    lambda d: dict(**d),
    len,
]


@pytest.mark.parametrize("read", READS)
def test_reads_like_a_dict(read: Callable[[Any], Any]) -> None:
    lazy = LazyDict(Source())
    lazy["c"]
    got, expected = read(lazy), read(dict(WHOLE))
    if read is reversed:
        got, expected = list(got), list(expected)
    assert got == expected


CHANGES: list[Callable[[Any], Any]] = [
    lambda d: d.update(x=[1]),
    lambda d: d.setdefault("a", []).append(1),
    lambda d: d.setdefault("x", []),
    lambda d: d.pop("a"),
    lambda d: d.pop("x", None),
    lambda d: d.popitem(),
    lambda d: d.clear(),
    lambda d: d.__delitem__("b"),
    lambda d: d.__setitem__("b", 1),
    lambda d: d.__ior__({"y": 1}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_like_a_dict(change: Callable[[Any], Any]) -> None:
    lazy, plain = LazyDict(Source()), copy.deepcopy(WHOLE)
    lazy["c"]
    assert change(lazy) == change(plain)
    assert lazy == plain
    assert list(lazy.items()) == list(plain.items())
    assert len(lazy) == len(plain)


def test_values_keep_their_identity_when_the_rest_is_made() -> None:
    lazy = LazyDict(Source())
    made = lazy["b"]
    made.append("changed")
    assert list(lazy) == ["a", "b", "c"]
    assert lazy["b"] is made
    assert list(lazy.values())[1] == ["b", "changed"]
    with pytest.raises(KeyError):
        lazy["x"]
