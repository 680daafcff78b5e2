"""`app_state` and per-rank state, in one process, over storage in memory."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dcp_core import DefaultLoadPlanner, PerRank, load, save
from dcp_core.planning.replicas import value_bytes
from dcp_state import (
    RandomState,
    StateDictOptions,
    StateMismatchError,
    app_state,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from dcp_state.app import AppState
from integration_tests.kits.memory import MemoryReader, MemoryWriter


def run(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
    loss = net(torch.randn(4, 3)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return float(loss.detach()) + random.random() + float(np.random.random())


def test_everything_comes_back(request: pytest.FixtureRequest) -> None:
    first = run(0)
    train(*first)
    saved = app_state(first[0], first[1], scheduler=first[2], step=5, random=PerRank(RandomState()))
    save({"app": saved}, storage_writer=MemoryWriter(request.node.name))
    wanted = [train(*first) for _ in range(3)]
    second = run(1)
    app = app_state(second[0], second[1], scheduler=second[2], step=0, random=PerRank(RandomState()))
    report = load({"app": app}, storage_reader=MemoryReader(request.node.name))
    assert not report.unexpected
    assert app["step"] == 5
    assert "step" in app
    assert list(app) == ["step", "random"]
    assert not app.report.initialised
    assert [train(*second) for _ in range(3)] == wanted


def test_names_are_canonical() -> None:
    net, optimizer, scheduler = run(0)
    state = app_state(torch.compile(net, backend="eager"), optimizer, scheduler=scheduler, step=1).state_dict()
    assert list(state) == ["model", "optimizer", "schedulers", "step"]
    assert list(state["model"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(state["optimizer"]["state"]) == list(state["model"])
    assert list(state["optimizer"]["hyperparameters"]) == list(state["model"])
    assert not optimizer.state


MISFITS = {
    "no model": {"model": {}},
    "a model's tensor is missing": {"model": {"1.bias": None}},
    "a model's tensor is unknown": {"model": {"2.bias": torch.ones(2)}},
    "a model's tensor has another shape": {"model": {"1.bias": torch.ones(3)}},
    "no state of the optimizer": {"optimizer": {"state": {}}},
    "a state of the optimizer has another shape": {"optimizer": {"state": {"0.bias": {"exp_avg": torch.ones(9)}}}},
    "no scheduler": {"schedulers": ()},
    "the base": {"base_model": "text of others"},
}


def changed(state: dict[str, Any], by: dict[str, Any]) -> dict[str, Any]:
    inner = {name: changed(state[name], each) if isinstance(each, dict) and each else each for name, each in by.items()}
    return {name: each for name, each in {**state, **inner}.items() if each is not None}


def app_of(seed: int, *, trainable_only: bool) -> AppState:
    net, optimizer, scheduler = run(seed)
    if trainable_only:
        net.append(nn.Linear(2, 2).requires_grad_(False))
    train(net, optimizer, scheduler)
    return app_state(net, optimizer, scheduler=scheduler, trainable_only=trainable_only)


@pytest.mark.parametrize(
    ("kind", "trainable_only"),
    [(kind, only) for kind in MISFITS for only in (False, True) if only or kind != "the base"],
)
def test_state_that_does_not_fit_changes_nothing(kind: str, trainable_only: bool) -> None:
    saved, app = (app_of(seed, trainable_only=trainable_only) for seed in (0, 1))
    before = value_bytes(app.state_dict())
    with pytest.raises(StateMismatchError):
        app.load_state_dict(changed(saved.state_dict(), MISFITS[kind]))
    assert value_bytes(app.state_dict()) == before


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in MISFITS if "tensor" in kind or "of the optimizer has" in kind])
def test_what_does_not_fit_leaves_model_and_optimizer(kind: str, broadcast: bool) -> None:
    options = StateDictOptions(full_state_dict=broadcast, broadcast_from_rank0=broadcast)
    (net, optimizer, _), (other, other_optimizer, _) = run(0), run(1)
    model, of_optimizer = copy.deepcopy(get_state_dict(other, other_optimizer))
    optimizer.param_groups[0]["lr"] = 0.7
    before = value_bytes(get_state_dict(net, optimizer))
    misfit = changed({"model": model, "optimizer": of_optimizer}, MISFITS[kind])
    with pytest.raises(StateMismatchError):
        set_state_dict(
            net,
            optimizer,
            model_state_dict=misfit["model"],
            optim_state_dict=misfit["optimizer"],
            options=options,
        )
    assert value_bytes(get_state_dict(net, optimizer)) == before


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize(
    ("lacks", "has"), [("1.num_batches_tracked", ""), ("1.running_mean", ""), ("0.weight", ""), ("", "1.more")]
)
def test_batch_norm_is_no_hook(lacks: str, has: str, broadcast: bool) -> None:
    """torch's class for it replaces a method, to keep counters that old state dicts lack."""
    torch.manual_seed(0)
    own, torchs, saved = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(3))
    state = {name: value for name, value in saved.state_dict().items() if name != lacks}
    state |= {has: torch.ones(3)} if has else {}
    saved(torch.randn(5, 2))
    own(torch.randn(5, 2))
    torchs.load_state_dict(own.state_dict())
    before = value_bytes(own.state_dict())
    options = StateDictOptions(full_state_dict=broadcast, broadcast_from_rank0=broadcast)
    try:
        torchs.load_state_dict(state)
    except RuntimeError:
        with pytest.raises(StateMismatchError):
            set_model_state_dict(own, state, options=options)
        assert value_bytes(own.state_dict()) == before
    else:
        set_model_state_dict(own, state, options=options)
        assert value_bytes(own.state_dict()) == value_bytes(torchs.state_dict())


FOREIGN = [None, 3, "x", b"x", [1], (), {}, {1: 2}, {"a": 1}, torch.zeros(2), [[1, 2]], {"weight": None}, object()]


def places(state: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(state, dict | tuple | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from places(value, (*at, key))


def replaced(state: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    if isinstance(state, dict):
        return {**state, at[0]: replaced(state[at[0]], at[1:], value)}
    return [replaced(each, at[1:], value) if number == at[0] else each for number, each in enumerate(state)]


def small_app() -> AppState:
    """A trained parameter, a frozen one, and a group without parameters."""
    net = nn.Linear(2, 1)
    nn.init.ones_(net.weight)
    net.bias.requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": [net.weight]}, {"params": []}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    return app_state(net, optimizer, scheduler=scheduler, trainable_only=True)


def test_foreign_values_are_refused_with_one_error() -> None:
    state = copy.deepcopy(small_app().state_dict())
    refused = 0
    for at in places(state):
        for value in FOREIGN if at else ():
            app = small_app()
            try:
                app.load_state_dict(replaced(state, at, value))
            except StateMismatchError:
                refused += 1
    assert refused > 300


def test_the_state_of_another_kind_of_optimizer_changes_nothing() -> None:
    (net, optimizer, _), (other, _, _) = run(0), run(1)
    sgd = torch.optim.SGD(other.parameters(), lr=0.2, momentum=0.9)
    other(torch.ones(1, 3)).sum().backward()
    sgd.step()
    before, groups, held = value_bytes(get_state_dict(net, optimizer)), optimizer.param_groups, optimizer.state
    with pytest.raises(StateMismatchError, match=r"AdamW\.load_state_dict refuses it: KeyError"):
        set_state_dict(
            net,
            optimizer,
            model_state_dict=get_state_dict(net, ())[0],
            optim_state_dict=get_state_dict(other, sgd)[1],
        )
    assert value_bytes(get_state_dict(net, optimizer)) == before
    assert (optimizer.param_groups, optimizer.state) == (groups, held)


def test_another_runs_state_is_copied() -> None:
    first, second = run(0), run(1)
    train(*first)
    app_state(*second[:2]).load_state_dict(app_state(*first[:2]).state_dict())
    before = first[1].state[first[0][0].weight]["exp_avg"].clone()
    train(*second)
    assert torch.equal(first[1].state[first[0][0].weight]["exp_avg"], before)


def test_mistakes_are_told() -> None:
    net, optimizer, scheduler = run(0)
    with pytest.raises(ValueError, match="'schedulers'"):
        app_state(net, optimizer, schedulers=1)
    state = app_state(net, optimizer).state_dict()
    with pytest.raises(StateMismatchError, match="0 were saved, there are 1"):
        app_state(net, optimizer, scheduler=scheduler).load_state_dict(state)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(0.00100001), torch.tensor(0.00100004)), (0.0, -0.0), (1, True), (1.0, 1),
        (torch.tensor(0.0), torch.tensor(-0.0)), (float("nan"), 1.0), ((1, 2), [1, 2]),
    ],
)  # fmt: skip
def test_hyperparameters_of_two_groups_that_look_alike_stay_apart(
    request: pytest.FixtureRequest, one: object, other: object
) -> None:
    """Some values print alike, some are equal: each group gets its own value."""

    def make(*values: object) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [
            {"params": part.parameters(), "note": value} for part, value in zip(net.children(), values, strict=True)
        ]
        return net, torch.optim.SGD(groups, lr=0.1)

    save({"app": app_state(*make(one, other))}, storage_writer=MemoryWriter(request.node.name))
    net, optimizer = make(None, None)
    load({"app": app_state(net, optimizer)}, storage_reader=MemoryReader(request.node.name))
    found = [group["note"] for group in optimizer.param_groups]
    assert [value_bytes(value) for value in found] == [value_bytes(value) for value in (one, other)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net, opt, sched: app_state(opt, net), "model is an nn.Module.* class AdamW; call app_state"),
        (lambda net, opt, sched: app_state(net.state_dict(), opt), "model is .*of class str"),
        (lambda net, opt, sched: app_state([net, opt]), "model is .*of class AdamW"),
        (lambda net, opt, sched: app_state(net, sched), "optimizer is .*of class StepLR"),
        (lambda net, opt, sched: app_state(net, net), "optimizer is .*of class Sequential"),
        (lambda net, opt, sched: app_state(net, opt.state_dict()), "str is no torch.optim.Optimizer"),
        (lambda net, opt, sched: app_state(net, opt, scheduler=opt), "scheduler is .*of class AdamW"),
        (lambda net, opt, sched: app_state(net, opt, scheduler=[sched, 3]), "scheduler is .*of class int"),
        (lambda net, opt, sched: app_state(net, opt, strict="yes"), "strict is True or False, not .*str"),
        (lambda net, opt, sched: app_state(net, opt, options=StateDictOptions()), "takes no StateDictOptions"),
    ],
)  # fmt: skip
def test_arguments_of_another_kind_are_refused_with_the_right_call(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(*run(0))


def test_usual_arguments_are_accepted() -> None:
    net, optimizer, scheduler = run(0)
    for made in (
        app_state([net], [optimizer], scheduler=[scheduler]),
        app_state(iter([net]), iter([optimizer]), scheduler=iter([scheduler]), options="mine"),
        app_state(nn.ModuleList([net])),
        app_state(net, None, scheduler=None, strict=False),
    ):
        assert made.state_dict()["model"]


def test_a_report_says_what_the_checkpoint_did_not_have(request: pytest.FixtureRequest) -> None:
    net, optimizer, scheduler = run(0)
    net[0].requires_grad_(False)
    train(net, optimizer, scheduler)
    save(
        {"app": app_state(net, torch.optim.AdamW(net[1].parameters()))}, storage_writer=MemoryWriter(request.node.name)
    )
    net, optimizer, scheduler = run(1)
    app = app_state(net, optimizer, best=1.5)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    load({"app": app}, storage_reader=MemoryReader(request.node.name), planner=planner)
    missing = {f"{kind}.0.{name}" for kind in ("state", "param_groups") for name in ("weight", "bias")}
    assert app.report.initialised.keys() == {*missing, "best"}
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3]  # of the save, not the template's
    assert {*app.report.restored} == {*net.state_dict(), "state.1.weight", "state.1.bias"}
    assert app["best"] == 1.5


class Layers(nn.Module):
    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in numbers})

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            value = layer(value)
        return value


BOOKKEEPING: dict[str, dict[str, Any]] = {
    "named parameters": {},
    "name": {"name": "layer {}"},
    "names": {"tags": ["layer {}", "decay"]},
    "names in a set": {"tags": {"layer {}", "decay"}},
    "names of names": {"tags": {"layer {}": [("decay", "layer {}")]}},
    "path": {"tags": PurePosixPath("layer {}")},
    "device": {"tags": torch.device("cpu", 0)},
    "one None": {"tags": "layer 0 {}"},
    "one without": {"tag": "second"},
    "implementation": {"foreach": True, "fused": None},
    "hyperparameter": {"weight_decay": 0.25, "note": 3},
}


def numbered(value: Any, number: int) -> Any:
    if isinstance(value, dict):
        return {numbered(key, number): numbered(each, number) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(numbered(each, number) for each in value)
    if isinstance(value, torch.device):
        return torch.device("cpu", number)
    if isinstance(value, str | PurePosixPath):
        text = str(value).format(number)
        return None if text == "layer 0 1" else type(value)(text)
    return value


def stage(number: int, entries: dict[str, Any], *, named: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A pipeline stage of one layer whose group carries what its script noted in it."""
    part = Layers(number)
    of_stage = {key: numbered(value, number) for key, value in entries.items()}
    if number == 0:
        of_stage.pop("tag", None)
    if "foreach" in entries and number:
        of_stage |= {"foreach": None, "fused": True}
    parameters = part.named_parameters() if named else part.parameters()
    optimizer = torch.optim.AdamW([{"params": [*parameters], **of_stage}], lr=0.01)
    part(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return part, optimizer


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", BOOKKEEPING)
def test_pipeline_stages_merge_whatever_their_groups_are_called(
    request: pytest.FixtureRequest, kind: str, named: bool
) -> None:
    stages = [stage(number, BOOKKEEPING[kind], named=named) for number in (0, 1)]
    states = [app_state(*each).state_dict()["optimizer"] for each in stages]
    assert states[0]["groups"] == states[1]["groups"]  # each rank would save it under the same name
    parts, optimizers = zip(*stages, strict=True)
    save({"app": app_state(parts, optimizers)}, storage_writer=MemoryWriter(request.node.name))

    net = Layers(0, 1)
    whole = torch.optim.AdamW([{"params": [*net.named_parameters()], "name": "all", "fused": False}], lr=0.5)
    app = app_state(net, whole)
    load({"app": app}, storage_reader=MemoryReader(request.node.name))
    (group,) = whole.param_groups
    assert group["param_names"] == [name for name, _ in net.named_parameters()]
    assert not {"tag", "tags"} & group.keys()
    assert (group["name"], group["lr"]) == ("all", 0.01)
    assert (group["weight_decay"], group.get("note")) == ((0.25, 3) if kind == "hyperparameter" else (0.01, None))
    for part, optimizer in stages:
        for name, parameter in part.named_parameters():
            ours, its = whole.state[net.get_parameter(name)], optimizer.state[parameter]
            assert torch.equal(ours["exp_avg"], its["exp_avg"])
    whole.step()


def test_text_that_a_script_notes_in_a_group_comes_back(request: pytest.FixtureRequest) -> None:
    net, optimizer = stage(0, {"phase": "decay"})
    save({"app": app_state(net, optimizer)}, storage_writer=MemoryWriter(request.node.name))
    for begin in ({"phase": "warmup"}, {}):
        net, optimizer = stage(0, begin)
        load({"app": app_state(net, optimizer)}, storage_reader=MemoryReader(request.node.name))
        assert optimizer.param_groups[0]["phase"] == "decay"


@pytest.mark.parametrize("entry", ["betas", "adjust_lr_fn"])
def test_hyperparameters_still_keep_groups_apart(request: pytest.FixtureRequest, entry: str) -> None:
    """The second one is a text, and a hyperparameter: the optimizer has a default for it."""
    values = {"betas": [(0.9, 0.99), (0.5, 0.99)], "adjust_lr_fn": ["original", "match_rms_adamw"]}[entry]

    def make(*groups: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = [{"params": group, entry: value} for group, value in zip(groups, values, strict=False)]
        return torch.optim.AdamW(made) if entry == "betas" else torch.optim.Muon(made)

    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    save(
        {"app": app_state(net, make([net[0].weight], [net[1].weight]))}, storage_writer=MemoryWriter(request.node.name)
    )
    with pytest.raises(StateMismatchError, match=f"saved with different {entry};"):
        load({"app": app_state(net, make([*net.parameters()]))}, storage_reader=MemoryReader(request.node.name))
