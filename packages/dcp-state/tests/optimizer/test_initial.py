"""A stand-in shares nothing mutable with its optimizer; attributes that cannot be copied are named."""

from __future__ import annotations

import collections
import functools
import gc
import sys
import types
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn

from dcp_core import UnsupportedValueError
from dcp_state import get_optimizer_state_dict, set_optimizer_state_dict
from dcp_state.optimizer import initial
from dcp_state.optimizer.copying import IsolatedCopies
from dcp_state.optimizer.initial import make_stand_in


class Record(NamedTuple):
    values: list[Any]


class Helper:
    """Plain data that references the optimizer."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.counts = {"steps": [0]}


class Entangled(torch.optim.SGD):
    """Holds itself, its parameters and its state in every way that plain data allows, and changes what it holds."""

    history: ClassVar[list[int]] = []

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        first = self.param_groups[0]["params"][0]
        counter = [0]

        def count(amount: int = 1) -> None:
            counter[0] += amount

        self.count = count
        self.again = self.add
        self.myself = self
        self.helper = Helper(self)
        self.kept = [self.param_groups, {"first": first}, Record([first]), collections.deque([first])]
        self.masters = [first.detach().clone()]
        self.random = torch.Generator().manual_seed(1)
        self.by_parameter = {first: "first"}
        self.module = nn.Linear(1, 1)
        self.partly = functools.partial(self.add, 1)

    def add(self, amount: int) -> None:
        self.helper.counts["steps"][0] += amount

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count()
        self.again(1)
        self.history.append(1)
        for master in self.masters:
            master.zero_()
        self.kept[1]["first"].zero_()
        self.helper.owner.param_groups[0]["lr"] = 9.0
        torch.rand(1, generator=self.random)
        super().step()


class Closed(torch.optim.SGD):
    """Cannot take a step without a closure."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        super().step()


def _reachable(root: Any) -> dict[int, Any]:
    """All objects reachable from an object, except through classes, modules and the globals of functions."""
    found: dict[int, Any] = {}
    open_ends = [root]
    while open_ends:
        value = open_ends.pop()
        if id(value) in found or isinstance(value, type | types.ModuleType):
            continue
        found[id(value)] = value
        if isinstance(value, types.FunctionType):
            open_ends += [value.__closure__, value.__defaults__, value.__kwdefaults__]
        else:
            open_ends += gc.get_referents(value)
    return found


def test_a_stand_in_leads_to_nothing_of_the_optimizer() -> None:
    net = nn.Linear(2, 2)
    optimizer = Entangled(net.parameters())
    optimizer.state[net.weight] = {"momentum_buffer": torch.ones(2, 2)}
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trial = torch.zeros(2, 2, requires_grad=True)
    with make_stand_in(optimizer, optimizer.param_groups[0], trial) as (stand_in, missing):
        reached = _reachable(stand_in)
        assert vars(stand_in)["history"] is not Entangled.history
    assert missing == ["'module', a Linear", "'partly', a partial"]
    real = _reachable(vars(optimizer))
    shared = [real[key] for key in reached.keys() & real.keys() if gc.is_tracked(real[key])]
    changeable = [each for each in shared if isinstance(each, list | dict | set | torch.Tensor | torch.optim.Optimizer)]
    assert changeable == []
    assert not [each for each in reached.values() if each is optimizer or each is net.weight]


def test_looking_at_an_entangled_optimizer() -> None:
    net = nn.Linear(2, 2)
    optimizer = Entangled(net.parameters())
    weight, randomness = net.weight.detach().clone(), optimizer.random.get_state()
    state = get_optimizer_state_dict(net, optimizer)["state"]
    assert set(state["weight"]) == {"momentum_buffer"}
    assert torch.equal(net.weight, weight)
    assert torch.equal(optimizer.masters[0], weight)
    assert torch.equal(optimizer.random.get_state(), randomness)
    assert optimizer.helper.counts == {"steps": [0]}
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert Entangled.history == []


def test_one_trial_finds_the_state_of_a_whole_group_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(optimizer: Any, group: Any, *parameters: torch.Tensor) -> Any:
        made.append(len(parameters))
        return make_stand_in(optimizer, group, *parameters)

    monkeypatch.setattr(initial, "make_stand_in", counted)
    net = nn.Sequential(*(nn.Linear(size, size + 1) for size in range(1, 9)))
    net[0].weight.data.fill_(torch.nan)
    optimizer = torch.optim.AdamW([{"params": net[:4].parameters()}, {"params": net[4:].parameters(), "amsgrad": True}])
    state = get_optimizer_state_dict(net, optimizer)
    assert made == [1, 8, 1, 8]
    made.clear()
    set_optimizer_state_dict(net, optimizer, state)
    assert made == [1, 1]
    assert not any(parameter.grad is not None for parameter in net.parameters())
    tensors = [value for values in state["state"].values() for value in values.values()]
    assert len(tensors) == 8 * 3 + 8 * 4
    assert not any(map(torch.count_nonzero, tensors))
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_what_cannot_be_copied_is_named() -> None:
    class NeedsModule(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.module.weight.data.zero_()

    net = nn.Linear(2, 2)
    optimizer = NeedsModule(net.parameters(), lr=0.1)
    optimizer.module = net
    weight = net.weight.detach().clone()
    with pytest.raises(UnsupportedValueError, match=r"NeedsModule .*'module', a Linear.*initial_state"):
        get_optimizer_state_dict(net, optimizer)
    assert torch.equal(net.weight, weight)


def test_a_class_that_knows_its_optimizers_is_refused() -> None:
    class Registered(torch.optim.SGD):
        made: ClassVar[list[Any]] = []

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.made.append(nn.Linear(1, 1))

    net = nn.Linear(2, 2)
    with pytest.raises(UnsupportedValueError, match="class attribute 'made'"):
        get_optimizer_state_dict(net, Registered(net.parameters()))


def test_state_that_belongs_to_no_parameter_is_refused_from_the_start() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.state["k"] = self.state.get("k", 0) + 1
            super().step()

    net = nn.Linear(2, 2)
    optimizer = Counting(net.parameters(), lr=0.1)
    for _ in range(2):
        with pytest.raises(UnsupportedValueError, match=r"belongs to no parameter \('k'\)"):
            get_optimizer_state_dict(net, optimizer)
        net(torch.ones(2)).sum().backward()
        optimizer.step()


def test_entries_besides_state_and_groups_are_warned_of() -> None:
    class Noted(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "averager": 3}

    net = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="'averager'"):
        get_optimizer_state_dict(net, Noted(net.parameters(), lr=0.1))


class Slotted:
    __slots__ = ("value",)


@pytest.mark.parametrize(
    "value", [Slotted(), [1].append, nn.Linear(1, 1), iter([]), type("Odd", (dict,), {})(), functools.partial(int)]
)
def test_what_is_no_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        IsolatedCopies([]).copy([value])


def _tensors() -> list[torch.Tensor]:
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "Closed", "Entangled"])
def test_a_trial_leaves_nothing_to_the_garbage_collector(name: str) -> None:
    # A cycle would keep several tensors as large as the parameter until the next collection, which may be far away.
    net = nn.Linear(7, 3)
    optimizer = globals().get(name, getattr(torch.optim, name, None))(net.parameters())
    gc.collect()
    gc.disable()
    try:
        before = set(map(id, _tensors()))
        get_optimizer_state_dict(net, optimizer)
        assert [each for each in _tensors() if id(each) not in before] == []
    finally:
        gc.enable()


def test_no_update_is_computed_also_where_the_step_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    # AdamW inherits Adam's step. Which class the decorator for hooks was put on depends on which one was made first.
    def update(*_: Any, **__: Any) -> None:
        raise AssertionError("an update was computed")

    monkeypatch.setitem(vars(sys.modules["torch.optim.adam"]), "adam", update)
    step: Any = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", torch.optim.Optimizer.profile_hook_step(step), raising=False)
    net = nn.Linear(7, 3)
    assert set(get_optimizer_state_dict(net, torch.optim.AdamW(net.parameters()))["state"]) == {"weight", "bias"}
