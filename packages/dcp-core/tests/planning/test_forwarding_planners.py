"""A planner of no class of ours that forwards what it lacks to one of ours: its own methods are never passed by."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core import DefaultLoadPlanner, DefaultSavePlanner, load, save


class Forwarding:
    def __init__(self, planner: Any) -> None:
        self.planner = planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.planner, name)


class Doubling(Forwarding):
    def resolve_data(self, write_item: Any) -> Any:
        data = self.planner.resolve_data(write_item)
        return data * 2 if isinstance(data, torch.Tensor) else data


class LeavingOut(Forwarding):
    """Leaves out names that begin with the name it is told."""

    def __init__(self, planner: Any, name: str) -> None:
        super().__init__(planner)
        self.name = name

    def create_local_plan(self) -> Any:
        plan = self.planner.create_local_plan()
        items = [item for item in plan.items if not item.index.fqn.startswith(self.name)]
        return dataclasses.replace(plan, items=items)


class Halving(Forwarding):
    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor /= 2
        self.planner.commit_tensor(read_item, tensor)


TENSORS = {
    "small": lambda: torch.ones(4),
    "large": lambda: torch.ones(300_000),
    "transposed": lambda: torch.ones(600, 500).T,
    "strided": lambda: torch.ones(600, 500)[:, ::2],
    "bfloat16": lambda: torch.ones(50, dtype=torch.bfloat16),
    "complex": lambda: torch.ones(50, dtype=torch.complex64),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_values_that_are_changed_while_they_are_saved(tmp_path: Path, kind: str) -> None:
    save({"a": TENSORS[kind](), "step": 3}, checkpoint_id=tmp_path / "c", planner=Doubling(DefaultSavePlanner()))
    template = {"a": torch.zeros_like(TENSORS[kind]()), "step": 0}
    load(template, checkpoint_id=tmp_path / "c")
    assert (template["a"] == 2).all()
    assert template["step"] == 3


@pytest.mark.parametrize("kind", TENSORS)
def test_values_that_are_changed_while_they_are_loaded(tmp_path: Path, kind: str) -> None:
    save({"a": TENSORS[kind](), "step": 3}, checkpoint_id=tmp_path / "c")
    template = {"a": torch.zeros_like(TENSORS[kind]()), "step": 0}
    load(template, checkpoint_id=tmp_path / "c", planner=Halving(DefaultLoadPlanner()))
    assert (template["a"] == 0.5).all()
    assert template["step"] == 3


def test_plans_of_one_planner_are_not_those_of_another(tmp_path: Path) -> None:
    """The plan cache knows the inner planner's options only."""
    inner = DefaultSavePlanner()
    state = {"a1": torch.ones(4), "b1": torch.ones(4), "step": 3}
    for number, name in enumerate(("a", "b", "a", "nothing")):
        saved = save(state, checkpoint_id=tmp_path / str(number), planner=LeavingOut(inner, name))
        assert set(saved.state_dict_metadata) == {key for key in state if not key.startswith(name)}
