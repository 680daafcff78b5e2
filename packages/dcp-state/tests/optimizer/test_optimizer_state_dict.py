"""Optimizer state by name, in one process: complete and exact; reading it changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from dcp_core import UnsupportedValueError
from dcp_state import (
    StateDictOptions,
    StateMismatchError,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from dcp_state.options import OptimizerStateType

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AdamW amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "AdamW tensor lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> float:
    data = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
    loss = net(data).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_on_as_if_nothing_had_happened(name: str, options: StateDictOptions | None, steps: int) -> None:
    """Three runs stay equal: one is left alone, the state of one is read, and one is restored from that state."""
    runs = []
    for _ in range(2):
        net = model()
        runs.append((net, OPTIMIZERS[name](net.parameters())))
        for number in range(steps):
            step(*runs[-1], number)
    untouched, looked_at = runs
    before = copy.deepcopy(looked_at[1].state_dict())
    state = get_state_dict(*looked_at, options=options)
    assert same(before, looked_at[1].state_dict())
    assert all(parameter.grad is None for parameter in looked_at[0].parameters())
    third_net = model(seed=1)
    third = (third_net, OPTIMIZERS[name](third_net.parameters()))
    given = copy.deepcopy(state)
    set_state_dict(*third, model_state_dict=state[0], optim_state_dict=state[1], options=options)
    assert same(given, state)
    losses = [[step(*run, number) for number in range(7, 10)] for run in (untouched, looked_at, third)]
    assert losses[0] == losses[1] == losses[2]


def test_a_state_dict_is_not_kept() -> None:
    """Training continues without changing the state dict that was loaded."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer)
    given = copy.deepcopy(get_optimizer_state_dict(net, optimizer))
    wanted = copy.deepcopy(given)
    set_optimizer_state_dict(net, optimizer, given)
    step(net, optimizer)
    assert same(given, wanted)


def test_looking_fires_no_hook() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: fired.append("global"))
    state = torch.get_rng_state()
    try:
        set_optimizer_state_dict(net, optimizer, get_optimizer_state_dict(net, optimizer))
    finally:
        everywhere.remove()
    assert fired == []
    assert torch.equal(state, torch.get_rng_state())
    assert scheduler.get_last_lr() == [0.001]


def test_a_parameter_without_state_is_complete() -> None:
    net = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    optimizer = torch.optim.Adam(net.parameters())
    net["used"](torch.ones(2)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(net, optimizer)["state"]
    assert set(state) == {"used.weight", "used.bias", "unused.weight", "unused.bias"}
    assert state["used.bias"]["step"] == 1
    assert state["unused.bias"]["step"] == 0
    assert set(optimizer.state) == set(net["used"].parameters())


def test_frozen_parameters_empty_groups_and_extra_keys() -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = model(seed)
        net[0].weight.requires_grad_(False)
        groups = [
            {"params": list(net[0].parameters())},
            {"params": [], "lr": 0.5},
            {"params": list(net[2].parameters())},
        ]
        return net, torch.optim.AdamW([*groups, {"params": [], "lr": 0.7}])

    net, optimizer = make(0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.param_groups[1]["lr"] = 0.25
    step(net, optimizer)
    state = get_optimizer_state_dict(net, optimizer)
    assert "0.weight" not in state["state"]
    assert state["param_groups"][0]["params"] == ["0.weight", "0.bias"]
    other, fresh = make(1)
    report = set_optimizer_state_dict(other, fresh, state)
    assert [group["lr"] for group in fresh.param_groups] == [0.001, 0.25, 0.001, 0.7]
    assert fresh.param_groups[0]["initial_lr"] == 0.001
    assert report.restored == ["state.0.bias", "state.2.weight", "state.2.bias"]
    assert (report.initialised, report.dropped) == ({}, {})


def test_other_groups_find_their_parameters_by_name() -> None:
    net = model()
    first = torch.optim.AdamW([{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters(), "lr": 0.2}])
    step(net, first)
    state = get_optimizer_state_dict(net, first)
    swapped = torch.optim.AdamW([{"params": net[2].parameters()}, {"params": net[0].parameters()}])
    set_optimizer_state_dict(net, swapped, state)
    assert [group["lr"] for group in swapped.param_groups] == [0.2, 0.1]
    several = [torch.optim.AdamW(net[0].parameters()), torch.optim.AdamW(net[2].parameters())]
    set_optimizer_state_dict(net, several, state)
    assert [optimizer.param_groups[0]["lr"] for optimizer in several] == [0.1, 0.2]
    assert same(get_optimizer_state_dict(net, several), state)
    with pytest.raises(StateMismatchError, match=r"share group 0, but were saved with different lr"):
        set_optimizer_state_dict(net, torch.optim.AdamW(net.parameters()), state)


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        (0.1, 0.1, True), (float("nan"), float("nan"), True), (torch.tensor(0.1), torch.tensor(0.1), True),
        (0.5, torch.tensor(0.5), True), (0.0, -0.0, False), (1, True, False), ((0.9, 0.99), [0.9, 0.99], False),
        (torch.tensor(0.0), torch.tensor(-0.0), False), (0.5, torch.tensor(0.25), False),
    ],
)  # fmt: skip
def test_one_group_takes_two_hyperparameters_only_if_they_are_the_same(one: object, other: object, fits: bool) -> None:
    net = model()
    groups = [{"params": net[0].parameters(), "note": one}, {"params": net[2].parameters(), "note": other}]
    state = copy.deepcopy(get_optimizer_state_dict(net, torch.optim.SGD(groups, lr=0.1)))
    together = torch.optim.SGD(net.parameters(), lr=0.1)
    if not fits:
        with pytest.raises(StateMismatchError, match="were saved with different note"):
            set_optimizer_state_dict(net, together, state)
        return
    set_optimizer_state_dict(net, together, state)
    found, wanted = (torch.as_tensor(each) for each in (together.param_groups[0]["note"], one))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_tied_parameters() -> None:
    net = nn.ModuleDict({"in": nn.Linear(2, 2, bias=False), "out": nn.Linear(2, 2, bias=False)})
    net["out"].weight = net["in"].weight
    optimizer = torch.optim.AdamW(net.parameters())
    net["out"](net["in"](torch.ones(2))).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(net, optimizer)
    assert list(state["state"]) == ["in.weight"]
    renamed = {
        "state": {"out.weight": state["state"]["in.weight"]},
        "param_groups": [{**state["param_groups"][0], "params": ["out.weight"]}],
    }
    assert set_optimizer_state_dict(net, optimizer, renamed).restored == ["state.in.weight"]


def test_all_that_does_not_fit_is_told_and_nothing_changed() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer)
    state = copy.deepcopy(get_optimizer_state_dict(net, optimizer))
    del state["state"]["0.bias"]
    state["state"]["2.weight"]["exp_avg"] = torch.ones(7)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StateMismatchError) as raised:
        set_optimizer_state_dict(net, optimizer, state)
    assert len(raised.value.problems) == 2
    assert "'0.bias' is trainable" in str(raised.value)
    assert "(7,)" in str(raised.value)
    assert same(before, optimizer.state_dict())
    del state["state"]["2.weight"]
    state["state"]["gone"] = {"step": torch.ones(())}
    report = set_optimizer_state_dict(net, optimizer, state, options=StateDictOptions(strict=False))
    assert set(report.initialised) == {"state.0.bias", "state.2.weight"}
    assert set(report.dropped) == {"state.gone"}
    with pytest.raises(StateMismatchError, match="empty"):
        set_optimizer_state_dict(net, optimizer, {})


def test_state_keeps_a_dtype_of_its_own() -> None:
    class WithFloatState(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault("master", parameter.float())
                    state["note"] = {"kind": "x", "count": state.get("note", {"count": 0})["count"] + 1}

    net = nn.Linear(2, 2).bfloat16()
    optimizer = WithFloatState(net.parameters(), lr=0.1)
    optimizer.step()
    state: OptimizerStateType = get_optimizer_state_dict(net, optimizer)
    fresh = WithFloatState(net.parameters(), lr=0.1)
    set_optimizer_state_dict(net, fresh, state)
    held = fresh.state[net.weight]
    assert held["master"].dtype == torch.float32
    assert held["note"] == {"kind": "x", "count": 1}


def test_tensor_learning_rates_stay_tensors_of_the_optimizer() -> None:
    net = model()
    saved = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.5))
    step(net, saved)
    state = get_optimizer_state_dict(net, saved)
    plain = torch.optim.AdamW(net.parameters(), lr=0.1)
    set_optimizer_state_dict(net, plain, state)
    assert plain.param_groups[0]["lr"] == 0.5
    assert isinstance(plain.param_groups[0]["lr"], float)
    tensor = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1))
    set_optimizer_state_dict(net, tensor, state)
    tensor.param_groups[0]["lr"].fill_(9.0)
    assert float(saved.param_groups[0]["lr"]) == 0.5


def test_a_plain_state_dict_with_indices_is_taken() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.3)
    step(net, optimizer)
    fresh = torch.optim.AdamW(net.parameters())
    set_optimizer_state_dict(net, fresh, optimizer.state_dict())
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_lbfgs_and_foreign_parameters_are_refused() -> None:
    net = model()
    with pytest.raises(UnsupportedValueError, match="one history"):
        get_optimizer_state_dict(net, torch.optim.LBFGS(net.parameters()))
    with pytest.raises(StateMismatchError, match=r"group 0, of shape \(4, 3\)"):
        get_optimizer_state_dict(net, torch.optim.SGD(model().parameters()))


def test_gradients_of_another_dtype_and_tensors_as_lr_do_not_matter() -> None:
    """Regression test for pytorch/pytorch#191918 and #139575."""
    net = torch.nn.Linear(2, 2)
    for parameter in net.parameters():
        parameter.grad_dtype = torch.bfloat16
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1))
    state = get_optimizer_state_dict(net, optimizer)
    assert set(state["state"]["weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert isinstance(state["param_groups"][0]["lr"], torch.Tensor)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert all(parameter.grad is None for parameter in net.parameters())
