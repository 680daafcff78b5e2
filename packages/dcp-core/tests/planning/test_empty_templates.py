"""Templates that hold less than the checkpoint: empty containers are filled, unused keys are named, ties count once."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_core import DefaultLoadPlanner, LoadMismatchError, PerRank, load, load_keys, save
from dcp_core.errors import UnsupportedValueError
from dcp_core.testing.trees import same
from integration_tests.kits.memory import MemoryReader, MemoryWriter

FULL: dict[str, Any] = {
    "numbers": [1.0, 2.0],
    "dicts": [{"loss": 1.0}, {"loss": 2.0, "more": {}}],
    "tensors": [torch.ones(1), torch.zeros(2, 2)],
    "lists of lists": [[torch.ones(1)], [{"a": 1}, []]],
    "dict": {"a": 1, "b": {"c": torch.arange(3)}, "empty": {}},
    "odd keys": {1: "one", (1, 2): torch.ones(2), "with.dot": {"x.y": 3}, False: 4, "": 5, None: {}},
    "objects": {"a": (1, 2), "b": {3, 4}, "c": None},
    "nothing": {},
}


class Holder:
    """A `Stateful` that begins empty."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["held"]


def saved(request: pytest.FixtureRequest, state: dict[str, Any]) -> MemoryReader:
    save(state, storage_writer=MemoryWriter(request.node.name))
    return MemoryReader(request.node.name)


@pytest.mark.parametrize("place", ["top", "nested", "in a list", "stateful"])
@pytest.mark.parametrize("kind", FULL)
def test_empty_containers_are_filled(request: pytest.FixtureRequest, kind: str, place: str) -> None:
    def at(value: Any) -> dict[str, Any]:
        return {
            "top": {"key": value, "other": 1},
            "nested": {"a.b": {"key": value}, "a": {"b": {"other": {"z": 1}}}},
            "in a list": {"key": [{"deep": value}, {"more": torch.ones(1)}]},
            "stateful": {"key": Holder(value)},
        }[place]

    reader = saved(request, at(FULL[kind]))
    template = at(type(FULL[kind])())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = load(template, storage_reader=reader)
    expected = at(FULL[kind])
    if place == "stateful":
        template, expected = template["key"].state_dict(), expected["key"].state_dict()
    assert same(template, expected), template
    assert not report.unexpected


@pytest.mark.parametrize("make", [dict, OrderedDict, lambda: defaultdict(list)])
def test_a_filled_container_keeps_its_class_and_no_other_is_changed(request: pytest.FixtureRequest, make: Any) -> None:
    reader = saved(request, {"a": {"x": 1}, "b": {"y": torch.ones(1)}})
    shared = make()
    template = {"a": shared, "b": shared}
    load(template, storage_reader=reader)
    assert (dict(template["a"]), dict(template["b"])) == ({"x": 1}, {"y": torch.ones(1)})
    assert type(template["a"]) is type(shared)
    assert not shared


def test_an_option_keeps_what_is_empty(request: pytest.FixtureRequest) -> None:
    reader = saved(request, {"a": {"x": 1}, "b": [torch.ones(1)], "c": 1})
    template: dict[str, Any] = {"a": {}, "c": 0}
    with pytest.warns(UserWarning, match=r"1 key\(s\) of the checkpoint were not loaded.*'a.x'"):
        load(template, storage_reader=reader, planner=DefaultLoadPlanner(fill_empty=False))
    assert template == {"a": {}, "c": 1}
    with pytest.raises(LoadMismatchError, match=r"state_dict: b\."):
        load({"b": []}, storage_reader=reader, planner=DefaultLoadPlanner(fill_empty=False))


def test_names_follow_a_rename(request: pytest.FixtureRequest) -> None:
    reader = saved(request, {"model": {"a.b": {"x": 1}, "a": {"b": {"y": 2}}}})
    template: dict[str, Any] = {"all": {}}
    load(template, storage_reader=reader, planner=DefaultLoadPlanner(rename={"all": "model"}))
    assert template == {"all": {"a.b": {"x": 1}, "a": {"b": {"y": 2}}}}


@pytest.mark.parametrize(("empty", "stored"), [([], {"a": 1}), ({}, [{"a": 1}])])
def test_a_container_of_the_other_kind_is_not_filled(request: pytest.FixtureRequest, empty: Any, stored: Any) -> None:
    reader = saved(request, {"key": stored})
    template = {"key": empty}
    if isinstance(empty, list):
        with pytest.raises(LoadMismatchError, match="Missing key in checkpoint state_dict: key"):
            load(template, storage_reader=reader)
    else:
        with pytest.warns(UserWarning, match=r"key\.0\.a"):
            load(template, storage_reader=reader)
    assert template == {"key": type(empty)()}


def test_a_template_stays_as_it_was_if_the_load_fails(request: pytest.FixtureRequest) -> None:
    reader = saved(request, {"a": {"x": torch.ones(1)}})
    template: dict[str, Any] = {"a": {}, "b": 1}
    with pytest.raises(LoadMismatchError):
        load(template, storage_reader=reader)
    assert template == {"a": {}, "b": 1}


def test_a_whole_template_that_is_empty_loads_nothing(request: pytest.FixtureRequest) -> None:
    template: dict[str, Any] = {}
    load(template, storage_reader=saved(request, {"a": {"x": 1}}))
    assert template == {}


LEAVES = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.just(torch.ones(2)))
KEYS = st.one_of(st.text(max_size=4), st.integers(), st.booleans())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.dictionaries(KEYS, inner, max_size=3), st.lists(inner, max_size=3)),
    max_leaves=8,
)


@given(st.dictionaries(st.text("ab.", max_size=3), TREES, min_size=1, max_size=3))
def test_what_load_keys_restores_fills_empty_containers(state: dict[str, Any]) -> None:
    try:
        save({"key": state}, storage_writer=MemoryWriter("empty templates"))
    except UnsupportedValueError:
        return
    template: dict[str, Any] = {"key": {}}
    load(template, storage_reader=MemoryReader("empty templates"))
    assert same(template, load_keys(storage_reader=MemoryReader("empty templates")))


# Optimizers.


def stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("as_text", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("stateful", [False, True])
def test_a_fresh_optimizer_warns(request: pytest.FixtureRequest, stateful: bool, as_text: bool) -> None:
    net, optimizer = stepped()
    state = optimizer.state_dict()
    if as_text:  # as stock names them
        state["state"] = {str(key): value for key, value in state["state"].items()}
    reader = saved(request, {"optim": state})
    fresh = torch.optim.AdamW(net.parameters())
    template = {"optim": fresh if stateful else fresh.state_dict()}
    with pytest.warns(UserWarning, match=r"'optim\.state' is the state of an optimizer.*app_state"):
        load(template, storage_reader=reader)
    if not stateful:
        fresh.load_state_dict(template["optim"])
    for parameter in net.parameters():
        assert torch.equal(fresh.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    with pytest.warns(UserWarning, match="nothing of it is restored|were not loaded"):
        load(
            {"optim": torch.optim.AdamW(net.parameters())},
            storage_reader=reader,
            planner=DefaultLoadPlanner(fill_empty=False),
        )


# Keys that are not used.


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ({"model": {"a": 0}}, "3 key(s) of the checkpoint were not loaded"),
        ({"model": {"a": 0}}, "'model.b', 'model.c', 'model.d'."),
        ({"model": {"a": 0, "b": 0, "c": 0, "d": 0}}, ""),
        ({"other": 0}, ""),
        ({"random": PerRank(0)}, ""),
    ],
)
def test_unused_keys_below_a_key_of_the_template_are_named_once(
    request: pytest.FixtureRequest, template: dict[str, Any], named: str
) -> None:
    state = {"model": dict.fromkeys("abcd", 1), "other": 1, "random": {"rank_0": 1, "rank_1": 2}}
    reader = saved(request, state)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load(template, storage_reader=reader)
    assert len(told) == bool(named)
    assert not named or named in str(told[0].message)


class Parts:
    """A `Stateful` with some of the parts that were saved, as `app_state(model)` is without the optimizer."""

    def __init__(self, *names: str) -> None:
        self.state = {name: {"a": {"x": 1}, "b": 2} for name in names}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


@pytest.mark.parametrize("wanted", [("model",), ("model", "scheduler"), ("model", "optimizer")])
def test_parts_that_a_stateful_object_leaves_out_are_named_once(
    request: pytest.FixtureRequest, wanted: tuple[str, ...]
) -> None:
    parts = ("model", "optimizer", "scheduler")
    reader = saved(request, {"app": Parts(*parts), "other": {"x": 1}})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        report = load({"app": Parts(*wanted)}, storage_reader=reader)
    (message,) = [str(each.message) for each in told]
    left_out = [f"app.{part}.{key}" for part in parts if part not in wanted for key in ("a.x", "b")]
    assert message.startswith(f"{len(left_out)} key(s) of the checkpoint were not loaded")
    assert all(repr(name) in message for name in left_out[:3])
    assert {*left_out, "other.x"} == {*report.unexpected}


# Missing keys.


def test_an_error_of_missing_keys_names_the_option(request: pytest.FixtureRequest) -> None:
    reader = saved(request, {"a": 1})
    with pytest.raises(LoadMismatchError, match=r"state_dict: b\.[^$]*allow_partial_load=True"):
        load({"a": 0, "b": 0}, storage_reader=reader)


def _tied(kind: str) -> dict[str, torch.Tensor]:
    weight = torch.zeros(4, 6)
    return {
        "same": {"a": weight, "b": weight},
        "detached": {"a": weight, "b": weight.detach()},
        "parameters": {"a": torch.nn.Parameter(weight), "b": weight},
        "part": {"a": weight, "b": weight[1:3]},
        "strided part": {"a": weight, "b": weight[:, ::2]},
        "transposed": {"a": weight.t(), "b": weight},
        "parts": {"a": weight[:2], "a2": weight[2:], "b": weight},
        "empty": {"a": weight, "b": weight[:0]},
        "apart": {"a": weight, "b": weight.clone()},
        "overlapping": {"a": weight[:3], "b": weight[1:]},
    }[kind]


@pytest.mark.parametrize(
    ("kind", "stored", "fills"),
    [
        ("same", "a", True),
        ("same", "b", True),
        ("detached", "b", True),
        ("parameters", "a", True),
        ("transposed", "a", True),
        ("transposed", "b", True),
        ("part", "a", True),
        ("part", "b", False),
        ("strided part", "a", True),
        ("strided part", "b", False),
        ("parts", "b", True),
        ("parts", "a a2", True),
        ("parts", "a", False),
        ("empty", "a", False),
        ("apart", "a", False),
        ("overlapping", "a", False),
    ],
)
def test_memory_is_filled_by_whichever_name_is_stored(
    request: pytest.FixtureRequest, kind: str, stored: str, fills: bool
) -> None:
    template = _tied(kind)
    state = {name: torch.rand_like(template[name]) for name in stored.split()}
    reader = saved(request, state)
    if not fills:
        with pytest.raises(LoadMismatchError, match="Missing key in checkpoint state_dict"):
            load(template, storage_reader=reader)
        return
    report = load(template, storage_reader=reader)
    assert set(report.loaded) == set(template)
    assert not report.missing
    assert all(torch.equal(template[name], value) for name, value in state.items())
