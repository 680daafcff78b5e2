"""A run that is looked at between its steps, and in the middle of them, trains as one that is not: bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dcp_state
from dcp_ranks.testing.ranks import RankPool
from integration_tests.state.nets import Run, build

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
# FSDP1 itself refuses to give state while a step is under way.
KINDS = [("ddp", True), ("fsdp2", True), ("fsdp2-tp", True), ("fsdp1", False)]


def _look(run: Run) -> None:
    dcp_state.get_state_dict(run.parts[0], run.optimizer)
    dcp_state.app_state(run.parts, run.optimizer).state_dict()


def _values(run: Run) -> list[Any]:
    tensors = [parameter.detach() for part in run.parts for parameter in part.parameters()]
    return [getattr(tensor, "_local_tensor", tensor).tolist() for tensor in tensors]


def _trained(kind: str, *, looks: bool, amid_steps: bool) -> tuple[list[Any], Any]:
    run = build(kind)
    model = run.parts[0]
    if looks and amid_steps:
        model.register_forward_hook(lambda *_: _look(run))
        run.optimizer.register_step_pre_hook(lambda *_: _look(run))  # gradients are there, some state is not
    seen: list[Any] = []
    for number in range(3):
        if looks:
            before = [(id(parameter), id(parameter.grad)) for parameter in model.parameters()]
            randomness = torch.get_rng_state()
            _look(run)
            assert before == [(id(parameter), id(parameter.grad)) for parameter in model.parameters()]
            assert torch.equal(randomness, torch.get_rng_state())
            assert model.training
        seen.append(run.step(number))
    return [*seen, _values(run)], run.optimizer.param_groups[0]["lr"]


def _same(kind: str, amid_steps: bool) -> bool:
    untouched = _trained(kind, looks=False, amid_steps=amid_steps)
    return untouched == _trained(kind, looks=True, amid_steps=amid_steps)


@pytest.mark.parametrize(("kind", "amid_steps"), KINDS)
def test_a_run_that_is_looked_at_trains_as_one_that_is_not(ranks: RankPool, kind: str, amid_steps: bool) -> None:
    assert ranks.run(2, _same, kind, amid_steps) == [True, True]
