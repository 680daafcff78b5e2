from __future__ import annotations

import random
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import _nested_dict as stock
from torch.distributed.checkpoint._traverse import traverse_state_dict_v_2_3

from dcp_core.errors import CorruptCheckpointError, UnsupportedValueError
from dcp_core.state_dict.flatten import (
    assign,
    flatten,
    flatten_state_dict,
    get_element,
    set_element,
    unflatten_state_dict,
)
from dcp_manifest.index.literal_keys import LiteralKey

T = torch.zeros(1)

NAMES: list[tuple[dict[Any, Any], list[str]]] = [
    ({"a": T, "b": {"c": T, "d": {"e": 1}}}, ["a", "b.c", "b.d.e"]),
    ({"l": [1, 2]}, ["l"]),
    ({"l": []}, ["l"]),
    ({"l": [T, 1]}, ["l.0", "l.1"]),
    ({"l": [[1], [T]]}, ["l.0", "l.1.0"]),
    ({"l": [1, {"q": 2}]}, ["l.0", "l.1.q"]),
    ({"t": (T, 1), "s": {1, 2}}, ["t", "s"]),
    ({"t": [(T,)]}, ["t"]),
    ({"e": {}, "x": 1}, ["x"]),
    ({5: 1, "n": {6: T}}, ["5", "n.6"]),
    ({1: 1, "b": 2, None: 3, 2.5: 4}, ["1", "b", "None", "2.5"]),
    ({"o": OrderedDict(x=1)}, ["o.x"]),
    ({"deep": [{}]}, []),
]


@pytest.mark.parametrize(("state", "names"), NAMES)
def test_names(state: dict[Any, Any], names: list[str]) -> None:
    assert list(flatten(state).values) == names


def test_empty_mappings_are_reported() -> None:
    assert flatten({"e": {}, "l": [{}], "x": {"y": {}}}).empty == [("e",), ("l", 0), ("x", "y")]
    assert flatten({}).empty == []


def random_state(source: random.Random, depth: int) -> Any:
    kind = source.random()
    if depth == 0 or kind < 0.3:
        return source.choice([T, 1, "x", None, (T,), {1}, [1], [], {}])
    if kind < 0.6:
        keys = [source.choice(["a", "b", 1, 2, "1", None, 2.5]) for _ in range(source.randint(0, 3))]
        return {key: random_state(source, depth - 1) for key in keys}
    return [random_state(source, depth - 1) for _ in range(source.randint(0, 3))]


def attempt(function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except ValueError:
        return None


def old_stock(state: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def visit(path: tuple[Any, ...], value: Any) -> None:
        name = ".".join(map(str, path))
        if name in flat:
            raise ValueError(name)
        flat[name] = value

    traverse_state_dict_v_2_3(state, visit)
    return flat


def test_names_are_stocks_on_random_states() -> None:
    source = random.Random(5)
    clashes = 0
    for _ in range(3000):
        state = {f"{source.choice('ab1')}{i}": random_state(source, 3) for i in range(3)}
        theirs, ours = attempt(stock.flatten_state_dict, state), attempt(flatten, state)
        assert (theirs is None) == (ours is None)
        clashes += ours is None
        if ours is not None:
            assert [(name, id(value)) for name, value in ours.values.items()] == [
                (name, id(value)) for name, value in theirs[0].items()
            ]
            assert ours.paths == theirs[1]
            for name, keys in ours.keys.items():
                value: Any = state
                for key in keys:
                    value = value[key]
                assert value is ours.values[name]
        old = attempt(flatten, state, descend_plain=False)
        theirs = attempt(old_stock, state)
        assert (old is None) == (theirs is None)
        if old is not None:
            assert list(old.values) == list(theirs)
    assert clashes


def test_clash_names_both_places() -> None:
    with pytest.raises(UnsupportedValueError, match=r"'a\.b': the one at \('a\.b',\) and the one at \('a', 'b'\)"):
        flatten({"a.b": 1, "a": {"b": 2}})
    with pytest.raises(ValueError, match=r"'x\.5'"):
        flatten({"x": {5: 1, "5": 2}})


def test_tensors_as_keys_are_refused() -> None:
    """As in `optimizer.state`: their text changes with their values."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(UnsupportedValueError, match=r"is a tensor.*optimizer\.state_dict\(\)"):
        flatten({"state": optimizer.state})


def test_state_that_contains_itself() -> None:
    state: dict[str, Any] = {"a": {}}
    state["a"]["b"] = state
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        flatten(state)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": [T, {"c": 1}]}, "d": [1, 2], "t": (1, 2)},
        {5: 1, "n": {6: {7: T}}, "5b": {"x": 1}},
    ],
)
def test_unflatten_restores_keys_and_lists(state: dict[Any, Any]) -> None:
    flat, paths = flatten_state_dict(state)
    assert unflatten_state_dict(flat, paths) == state


def test_unflatten_fills_gaps_and_keeps_unknown_names_on_top() -> None:
    paths = {"l.2": ("l", 2), "l.0.q": ("l", 0, "q")}
    assert unflatten_state_dict({"l.2": 1, "l.0.q": 2, "new.name": 3}, paths) == {
        "l": [{"q": 2}, None, 1],
        "new.name": 3,
    }


def test_stock_unflattens_our_paths_alike() -> None:
    state = {"a": {"b": [T, {"c": 1}]}, "d": [1, 2], "t": (1, 2)}
    flat, paths = flatten_state_dict(state)
    assert stock.unflatten_state_dict(flat, paths) == unflatten_state_dict(flat, paths)


def test_writing_into_a_template_uses_its_keys_and_containers() -> None:
    template: dict[Any, Any] = {"n": {5: 0, "o": OrderedDict(x=0)}, "l": [{"q": 0}, T], 7: 0}
    nested, ordered = template["n"], template["n"]["o"]
    flat = flatten(template)
    for name, keys in flat.keys.items():
        assign(template, keys, name)
    assert template == {"n": {5: "n.5", "o": OrderedDict(x="n.o.x")}, "l": [{"q": "l.0.q"}, "l.1"], 7: "7"}
    assert template["n"] is nested
    assert template["n"]["o"] is ordered
    assert type(ordered) is OrderedDict


def test_template_that_cannot_be_changed() -> None:
    template = {"m": MappingProxyType({"x": 1})}
    with pytest.raises(UnsupportedValueError, match="mappingproxy"):
        assign(template, flatten(template).keys["m.x"], 2)


def test_elements() -> None:
    root: dict[Any, Any] = {}
    set_element(root, ("a", 1, LiteralKey("3")), "v")
    set_element(root, ("a", 0), "w")
    assert root == {"a": ["w", {3: "v"}]}
    assert get_element(root, ("a", 1, LiteralKey("3"))) == "v"
    for nowhere in (("a", 2), ("a", -1), ("a", "x"), ("b",), ("a", 0, "x"), ("a", 1, "4")):
        assert get_element(root, nowhere, "default") == "default"


def test_an_int_path_element_finds_a_str_key_where_that_is_what_there_is() -> None:
    root: dict[Any, Any] = {"n": {"5": 0}}
    set_element(root, ("n", LiteralKey("5")), 1)
    assert root == {"n": {"5": 1}}


@pytest.mark.parametrize(
    "paths",
    [
        [("a",), ("a", "b")],
        [("a", "b"), ("a", 0)],
        [("a", 0), ("a", "b")],
        [("a", 1 << 40)],
        [("a", -1)],
    ],
)
def test_paths_that_contradict_each_other(paths: list[tuple[str | int, ...]]) -> None:
    names = {str(number): path for number, path in enumerate(paths)}
    with pytest.raises(CorruptCheckpointError):
        unflatten_state_dict(dict.fromkeys(names, 7), names)
