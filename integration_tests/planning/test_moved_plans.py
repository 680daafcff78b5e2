"""Planners whose global plan gives a rank items that were not chosen from the items that it offered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_all as dcp

NAMES = [f"x{number}" for number in range(6)]


class Reversing(dcp.DefaultSavePlanner):
    """Rank 0 writes what rank 1 was to write, and rank 1 what rank 0 was to write."""

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return plans[::-1], metadata


class ReversingFirst(dcp.DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[Any]) -> Any:
        return super().create_global_plan(all_plans[::-1])


class ReversingInPlace(dcp.DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[Any]) -> Any:
        all_plans.reverse()
        return super().create_global_plan(all_plans)


class LeavingOut(dcp.DefaultSavePlanner):
    """Both ends of each rank's list are left out."""

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        left = [[item for item in plan.items if item.index.fqn not in (NAMES[0], NAMES[-1])] for plan in all_plans]
        return super().create_global_plan(
            [replace(plan, items=items) for plan, items in zip(all_plans, left, strict=True)]
        )


def save_replicas(folder: str, kind: type[dcp.DefaultSavePlanner]) -> list[dict[str, float]]:
    """Two saves of values that each rank holds, in another order, and what they stored."""
    names = NAMES[:: 1 - 2 * dist.get_rank()]
    stored = []
    for step in range(2):
        place = f"{folder}/{step}"
        dcp.save(
            {name: torch.full((4,), float(name[1:]) + step) for name in names}, checkpoint_id=place, planner=kind()
        )
        stored.append({name: float(value[0]) - step for name, value in dcp.load_keys(checkpoint_id=place).items()})
    return stored


@pytest.mark.parametrize("kind", [Reversing, ReversingFirst, ReversingInPlace, LeavingOut])
def test_values_have_their_own_names(ranks: Any, tmp_path: Path, kind: type[dcp.DefaultSavePlanner]) -> None:
    kept = NAMES[1:-1] if kind is LeavingOut else NAMES
    expected = {name: float(name[1:]) for name in kept}
    assert ranks.run(2, save_replicas, str(tmp_path), kind) == [[expected] * 2] * 2


def save_shards(folder: str) -> str:
    """The error of a save in which each rank shall write the other one's shard."""
    shards = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"weight": shards}, checkpoint_id=folder, planner=Reversing())
    return str(caught.value)


def test_a_shard_that_another_rank_holds_is_refused(ranks: Any, tmp_path: Path) -> None:
    for message in ranks.run(2, save_shards, str(tmp_path)):
        assert "failed on ranks 0-1" in message
        assert "rank 1: PlanError: 'weight': no shard of this rank holds the box at (0,) of (4,); a planner" in message
