"""A save replaces the checkpoint during a load, on places of each host: the load is planned again, on all ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_manifest import CheckpointNotFoundError
from integration_tests.hosts.pretended import NEAR, folder_of, job_on


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((300_000,), float(value)), "step": value}


class Replacing(dcp.DefaultLoadPlanner):
    """Replaces the checkpoint, once, when the index was read."""

    def __init__(self, replace: Any) -> None:
        super().__init__()
        self.replace = replace

    def finish_plan(self, plan: Any) -> Any:
        replace, self.replace = self.replace, None
        if replace is not None:
            replace()
        return super().finish_plan(plan)


def load_replaced(place: str, keepers: str, saver: int, cooperative: bool) -> tuple[int, list[float]]:
    """Load while one rank saves; returns what was loaded."""
    with mock.patch.dict(os.environ, DCP_KEEPER_DIR=keepers):
        if dist.get_rank() == 0:
            dcp.save(state(1), checkpoint_id=place, no_dist=True)
        dist.barrier()
        saves = dist.get_rank() == saver
        planner = Replacing((lambda: dcp.save(state(2), checkpoint_id=place, no_dist=True)) if saves else None)
        template = state(0)
        dcp.load(template, checkpoint_id=place, planner=planner, cooperative=cooperative)
        dist.barrier()
        if dist.get_rank() == 0 and place.startswith("keeper:"):
            dcp.stop_keeper("replaced")
    return template["step"], template["w"].unique().tolist()


@pytest.mark.parametrize("saver", [0, 1])
@pytest.mark.parametrize("cooperative", [False, True])
@pytest.mark.parametrize("scheme", ["", "host://", "keeper://"])
def test_a_save_that_replaces_the_checkpoint_is_loaded(
    ranks: Any, tmp_path: Path, scheme: str, cooperative: bool, saver: int
) -> None:
    place = "keeper://replaced/checkpoint" if scheme == "keeper://" else f"{scheme}{tmp_path}/checkpoint"
    found = ranks.run(2, load_replaced, place, str(tmp_path / "keepers"), saver, cooperative)
    assert found == [(2, [2.0])] * 2


def load_on_hosts(disks: str, changed: list[int], removed: bool) -> tuple[int, list[float]] | str:
    """Load a checkpoint of two hosts; meanwhile their folders get those of the next save, or lose theirs."""
    rank = dist.get_rank()
    with job_on(disks, ["a", "b"]) as host:
        for step in (2, 1):
            dcp.save(state(step) | {f"own{rank}": rank}, checkpoint_id=f"host://{NEAR}/step-1")
            dist.barrier()
            if step == 2:
                shutil.move(folder_of(disks, host, f"{NEAR}/step-1"), f"{disks}/next-{host}")

        def replace() -> None:
            shutil.rmtree(folder_of(disks, host, f"{NEAR}/step-1"))
            if not removed:
                shutil.move(f"{disks}/next-{host}", folder_of(disks, host, f"{NEAR}/step-1"))

        template = state(0)
        try:
            dcp.load(
                template, checkpoint_id=f"host://{NEAR}/step-1", planner=Replacing(replace if rank in changed else None)
            )
        except (dcp.CheckpointException, CheckpointNotFoundError) as error:
            return "no complete" if "has no complete checkpoint" in str(error) else "lacks"
    return template["step"], template["w"].unique().tolist()


def test_it_is_replaced_on_all_hosts(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, load_on_hosts, str(tmp_path), [0, 1], False) == [(2, [2.0])] * 2


@pytest.mark.parametrize("changed", [[0], [1]])
def test_what_one_host_alone_has_is_of_no_save(ranks: Any, tmp_path: Path, changed: list[int]) -> None:
    """All ranks see it in the same way, whichever host was first."""
    assert ranks.run(2, load_on_hosts, str(tmp_path), changed, False) == ["no complete"] * 2


def test_what_was_removed_was_not_replaced(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, load_on_hosts, str(tmp_path), [0, 1], True) == ["lacks"] * 2
