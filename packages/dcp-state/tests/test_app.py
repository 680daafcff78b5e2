"""`app_state` and per-rank state, in one process, over storage in memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dcp_core import PerRank, load, save
from dcp_core.planning.comparable_bytes import value_bytes
from dcp_core.testing.memory import MemoryReader, MemoryWriter
from dcp_state import RandomState, StateMismatchError, app_state


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
