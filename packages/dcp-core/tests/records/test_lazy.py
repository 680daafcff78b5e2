from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dcp_core.records.lazy import LazyDict, LazyList


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

    def has(self, key: object) -> bool:
        return key in ("a", "b", "c")

    def keys(self) -> Iterator[str]:
        return iter(("a", "b", "c"))

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


class ListSource:
    def __init__(self) -> None:
        self.walks = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        self.walks += 1
        return iter((3, 1, 2, 1))


LIST_USES: dict[str, Callable[[list[int]], Any]] = {
    "iterate": lambda items: [*items],
    "reversed": lambda items: list(reversed(items)),
    "contains": lambda items: (2 in items, 7 in items),
    "get": lambda items: (items[0], items[-1], items[1:3]),
    "set": lambda items: items.__setitem__(0, 9) or list(items),
    "delete": lambda items: items.__delitem__(0) or list(items),
    "add": lambda items: items + [5],  # noqa: RUF005 - the operator is what is tested
    "add to": lambda items: [5, *items],
    "extend in place": lambda items: items.__iadd__([5]) and list(items),
    "repeat": lambda items: (items * 2, 2 * items),
    "equal": lambda items: (items == [3, 1, 2, 1], items == [3, 1, 2, 1], items != [3], items < [4]),
    "show": repr,
    "append": lambda items: items.append(8) or list(items),
    "clear": lambda items: items.clear() or len(items),
    "copy": lambda items: (items.copy(), copy.copy(items), copy.deepcopy(items)),
    "count": lambda items: items.count(1),
    "extend": lambda items: items.extend([8]) or list(items),
    "index": lambda items: items.index(2),
    "insert": lambda items: items.insert(0, 8) or list(items),
    "pop": lambda items: (items.pop(), items.pop(0)),
    "remove": lambda items: items.remove(1) or list(items),
    "reverse": lambda items: items.reverse() or list(items),
    "sort": lambda items: items.sort() or list(items),
    "sorted": sorted,
    "pickle": lambda items: pickle.loads(pickle.dumps(items)),
    "sum": sum,
    "tuple": tuple,
    "join": lambda items: "".join(map(str, items)),
    "truth": bool,
    "right of a list": lambda items: [0] + items,  # noqa: RUF005 - it is what people write
    "sum of lists": lambda items: sum([items, [7], items], []),  # noqa: RUF017
    "enumerate": lambda items: list(enumerate(items)),
}


@pytest.mark.parametrize("use", LIST_USES)
def test_lazy_list_is_a_list(use):
    assert LIST_USES[use](LazyList(ListSource())) == LIST_USES[use]([3, 1, 2, 1])


def test_lazy_list_has_every_method_of_a_list():
    own = {name for name, value in vars(list).items() if callable(value)}
    harmless = {"__new__", "__init__", "__getattribute__", "__sizeof__", "__class_getitem__", "__hash__"}
    assert own - harmless <= set(vars(LazyList)) | {"__len__"}


def test_lazy_list_is_made_once_and_then_an_ordinary_one():
    source = ListSource()
    items = LazyList(source)
    assert (len(items), source.walks, items.source) == (4, 0, source)
    items.append(5)
    assert items[0] == 3
    assert (len(items), source.walks, items.source) == (5, 1, None)


def test_two_lazy_ones_compare_and_join_as_what_they_stand_for():
    def lists():
        return LazyList(("a", "b"))

    assert LazyDict(Source()) == LazyDict(Source())
    assert not LazyDict(Source()) != LazyDict(Source())  # noqa: SIM202
    assert LazyDict(Source()) | LazyDict(Source()) == WHOLE
    assert lists() == lists()
    assert not lists() != lists()  # noqa: SIM202
    assert lists() + lists() == ["a", "b"] * 2
