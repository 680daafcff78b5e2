"""Optimizers that wrap or hold others: the inner ones are found, or the outer one is refused and left unchanged."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dcp_base.hookspecs import hookimpl
from dcp_core import UnsupportedValueError, load, plugins, save
from dcp_state import (
    OptimizerAdapter,
    app_state,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from integration_tests.kits.memory import MemoryReader, MemoryWriter


class ByProperties(torch.optim.Optimizer):
    """Like accelerate's wrapper: groups and state are properties that return those of the inner optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step()


class ByAttribute(torch.optim.Optimizer):
    """Like PostLocalSGDOptimizer of torch: the groups are an attribute, which a load into the inner one makes stale."""

    def __init__(self, optim: Any) -> None:
        self.optim = optim
        self.param_groups = optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optim.step()


class ByClass:
    """Like Lightning's wrapper: derives from the inner optimizer's class, and takes all else from that optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("By" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step()


class Container(torch.optim.Optimizer):
    """Like torchtitan's container: one optimizer for each part of a model, and its own groups over all parameters."""

    def __init__(self, optimizers: list[Any], parameters: list[Any]) -> None:
        self.optimizers = optimizers
        super().__init__(parameters, {"lr": 0.1})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


class Joined(torch.optim.Optimizer):
    """Two kinds of optimizers in one: its groups are those of both."""

    def __init__(self, *members: Any) -> None:
        super().__init__(list(members[0].param_groups[0]["params"]), {})
        self.members = members
        self.param_groups = [group for each in members for group in each.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for member in self.members:
            member.step()


class Lookahead(torch.optim.Optimizer):
    """Has its own state besides that of the inner optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups[0]["params"], {})
        self.param_groups = optimizer.param_groups
        self.state["slow"] = [each.detach().clone() for each in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step()


class Synced(torch.optim.Optimizer):
    """Like ZeroRedundancyOptimizer: has its own hyperparameters, which each step copies to the inner optimizer."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer.param_groups[0]["params"], {"lr": 0.1})
        self.optim = optimizer

    def step(self, closure: Any = None) -> Any:
        self.optim.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        return self.optim.step()


def _net(seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    net = nn.ModuleDict(
        {"a": nn.Linear(3, 3), "b": nn.Linear(3, 2), "frozen": nn.Linear(3, 1), "unused": nn.Linear(1, 1)}
    )
    net["frozen"].requires_grad_(False)
    return net


def _inner(net: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return torch.optim.AdamW([{"params": trained[:2]}, {"params": trained[2:], "lr": 0.02}], lr=0.01)


def _parts(net: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(net["a"].parameters(), lr=0.01),
        torch.optim.SGD([*net["b"].parameters(), *net["unused"].parameters()], lr=0.1, momentum=0.9),
    ]


KNOWN: dict[str, Callable[[Any], Any]] = {
    "properties": lambda net: ByProperties(_inner(net)),
    "attribute": lambda net: ByAttribute(_inner(net)),
    "class": lambda net: ByClass(_inner(net)),
    "several layers": lambda net: ByProperties(ByClass(ByAttribute(_inner(net)))),
    "container": lambda net: Container(_parts(net), list(net.parameters())),
    "container of wrappers": lambda net: Container([*map(ByProperties, _parts(net))], list(net.parameters())),
    "container of one": lambda net: Container([_inner(net)], list(net.parameters())),
    "one each": lambda net: Container(
        [torch.optim.AdamW([each], lr=0.01) for each in net.parameters() if each.requires_grad], list(net.parameters())
    ),
    "wrapped container": lambda net: ByProperties(Container(_parts(net), list(net.parameters()))),
    "joined": lambda net: Joined(*_parts(net)),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "own state": lambda net: Lookahead(_inner(net)),
    "own hyperparameters": lambda net: Synced(_inner(net)),
    "some parameters": lambda net: Container(_parts(net)[:1], list(net.parameters())),
    "shared parameters": lambda net: Container([*_parts(net), _parts(net)[0]], list(net.parameters())),
    "refused inside": lambda net: ByProperties(Synced(_inner(net))),
}


def _step(net: Any, optimizer: Any, number: int) -> float:
    optimizer.zero_grad()
    data = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
    loss = (net["b"](net["a"](data)) + net["frozen"](data)).square().sum()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _held(net: Any, optimizer: Any) -> list[Any]:
    """The objects of all optimizers inside one another, with the values of their tensors."""
    found: list[Any] = [[(id(each), each.tolist(), id(each.grad)) for each in net.parameters()]]
    attributes = object.__getattribute__(optimizer, "__dict__")
    inner = [value for value in attributes.values() if isinstance(value, torch.optim.Optimizer)]
    inner += [
        each
        for value in attributes.values()
        if isinstance(value, list | tuple)
        for each in value
        if isinstance(each, torch.optim.Optimizer)
    ]
    for each in [optimizer, *inner]:
        groups = [
            (id(group), {name: id(value) for name, value in group.items()}, [*map(id, group["params"])])
            for group in each.param_groups
        ]
        state = [(id(key), id(value), [*map(id, value)]) for key, value in each.state.items()]
        found.append(
            (
                id(each),
                id(each.param_groups),
                groups,
                id(each.state),
                state,
                copy.deepcopy(list(map(str, each.state.values()))),
            )
        )
    return found + [part for each in inner for part in _held(net, each)]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", KNOWN)
def test_known_wrappers_are_seen_through(name: str, steps: int) -> None:
    """Nothing changes, all state is there by name, and a resumed run continues as if there had been no interruption."""
    runs = [(net, KNOWN[name](net)) for net in (_net(0), _net(0), _net(1), _net(1))]
    untouched, looked_at, by_dict, by_checkpoint = runs
    for run in (untouched, looked_at):
        for number in range(steps):
            _step(*run, number)
    before = _held(*looked_at)
    state = get_state_dict(*looked_at)
    save({"app": app_state(*looked_at)}, storage_writer=MemoryWriter(name))
    assert _held(*looked_at) == before
    assert set(state[1]["state"]) == {f"{part}.{kind}" for part in ("a", "b", "unused") for kind in ("weight", "bias")}
    set_state_dict(*by_dict, model_state_dict=state[0], optim_state_dict=state[1])
    load({"app": app_state(*by_checkpoint)}, storage_reader=MemoryReader(name))
    losses = [[_step(*run, number) for number in range(5, 9)] for run in runs]
    assert losses == [losses[0]] * 4


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_holders_are_refused_untouched(name: str) -> None:
    net, control = _net(0), _net(0)
    optimizer, other = REFUSED[name](net), REFUSED[name](control)
    before = _held(net, optimizer) if name != "own state" else [each.tolist() for each in net.parameters()]
    for call in (lambda: get_optimizer_state_dict(net, optimizer), lambda: app_state(net, optimizer)):
        with pytest.raises(UnsupportedValueError, match=r"holds other optimizers \(torch.optim.*OptimizerAdapter"):
            call()
    after = _held(net, optimizer) if name != "own state" else [each.tolist() for each in net.parameters()]
    assert after == before
    assert [_step(net, optimizer, number) for number in range(3)] == [
        _step(control, other, number) for number in range(3)
    ]


def test_hyperparameters_reach_joined_groups_after_a_load() -> None:
    """The groups stay the same objects, since schedulers hold them too and continue to change them."""
    first, second = _net(0), _net(1)
    saved, resumed = Joined(*_parts(first)), Joined(*_parts(second))
    for group in saved.param_groups:
        group["lr"] = 0.5
    groups = resumed.param_groups
    load_from = get_state_dict(first, saved)
    set_state_dict(second, resumed, model_state_dict=load_from[0], optim_state_dict=load_from[1])
    assert resumed.param_groups is groups
    assert [group["lr"] for group in groups] == [0.5, 0.5]
    assert all(own is inner.param_groups[0] for own, inner in zip(groups, resumed.members, strict=True))


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match=r"SimpleNamespace is no torch.optim.Optimizer"):
        app_state(_net(0), SimpleNamespace(param_groups=[]))  # type: ignore[arg-type]


def test_wrappers_that_hold_each_other_are_refused() -> None:
    net = _net(0)
    outer = ByProperties(ByProperties(_inner(net)))
    inner = outer.optimizer
    groups, state = inner.param_groups, inner.state
    inner.optimizer = SimpleNamespace(param_groups=groups, state=state)
    inner.back = outer
    with pytest.raises(UnsupportedValueError, match="holds it in turn"):
        get_optimizer_state_dict(net, outer)


def test_a_wrapper_that_hides_the_optimizer_is_read_but_never_tried() -> None:
    """The inner optimizer cannot be found: the wrapper's own state is read; missing state is not found by a trial."""
    net = _net(0)
    inner = _inner(net)
    hidden = ByProperties(
        SimpleNamespace(
            param_groups=inner.param_groups,
            state=inner.state,
            state_dict=inner.state_dict,
            step=inner.step,
            zero_grad=inner.zero_grad,
        )
    )
    before = _held(net, inner)
    with pytest.raises(UnsupportedValueError, match="groups and state that are not its own"):
        get_optimizer_state_dict(net, hidden)
    assert _held(net, inner) == before


def test_an_adapter_names_the_inner_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapter(OptimizerAdapter):
        def handles(self, kind: type) -> bool:
            return kind is Synced

        def inner(self, optimizer: Any) -> list[Any]:
            return [optimizer.optim]

    monkeypatch.setitem(sys.modules, "synced_adapters", SimpleNamespace(Adapter=Adapter))

    class Plugin:
        @hookimpl
        def dcp_register_state_adapters(self) -> dict[str, str]:
            return {"synced": "synced_adapters:Adapter"}

    net = _net(0)
    plugins.register(Plugin(), name="synced-test")
    try:
        state = get_optimizer_state_dict(net, ByProperties(Synced(_inner(net))))["state"]
    finally:
        plugins.unregister("synced-test")
    assert set(state["a.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
