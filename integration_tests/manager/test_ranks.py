"""The manager on several ranks: they resume together, and what one of them hears or fails at is everybody's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dcp_core import CheckpointException, CheckpointNotFoundError
from dcp_core.testing.sharding import distribute
from dcp_fs import FileSystemReader
from dcp_io import StoreBackend
from dcp_manager import (
    CheckpointManager,
    EverySteps,
    OnRequest,
    OnSignal,
)
from integration_tests.kits.damage import flip
from integration_tests.manager.checkpoints import Failing, steps


def sharded(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(1000.0).reshape(100, 10) + value
    return {"weight": distribute(full, mesh, [Shard(0)]), "step": int(value)}


def save_steps(root: str, wanted: list[int], **options: Any) -> list[int]:
    with CheckpointManager(root, **options) as manager:
        return [step for step in wanted if manager.maybe_save(step, sharded(step))]


def resume(root: str) -> tuple[int | None, bool]:
    template = sharded(-5)
    with CheckpointManager(root) as manager:
        found = manager.restore(template)
    if found is None:
        return None, True
    return found.step, torch.equal(template["weight"].to_local(), sharded(found.step)["weight"].to_local())


def test_ranks_resume_on_any_world_size(ranks: Any, tmp_path: Path) -> None:
    root = str(tmp_path)
    assert ranks.run(2, resume, root) == [(None, True)] * 2
    assert ranks.run(2, save_steps, root, [1, 2, 3]) == [[1, 2, 3]] * 2
    for world_size in (1, 2, 4):
        assert ranks.run(world_size, resume, root) == [(3, True)] * world_size
    damage_any(tmp_path / "step-3")
    assert ranks.run(4, resume, root) == [(2, True)] * 4
    assert ranks.run(2, resume, root) == [(2, True)] * 2


def damage_any(folder: Path) -> None:
    data = max(folder.glob("*.distcp"))
    flip(data)


class Unmounted(FileSystemReader):
    """Sees an empty folder on the last rank."""

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        there = dist.get_rank() < dist.get_world_size() - 1
        return super()._open(checkpoint_id if there else str(checkpoint_id).replace("step-", "nothing-"))


def resume_unmounted(root: str) -> str:
    with CheckpointManager(root, reader=Unmounted) as manager:
        try:
            found = manager.restore(sharded(-5))
        except CheckpointNotFoundError as error:
            return str(error)
    return "restored" if found is None else f"restored {found.step}"


def test_what_one_rank_does_not_see_is_no_damage(ranks: Any, tmp_path: Path) -> None:
    root = str(tmp_path)
    ranks.run(2, save_steps, root, [1, 2])
    for told in ranks.run(2, resume_unmounted, root):
        assert "the coordinator sees step 2" in told
        assert "rank 1: " in told
        assert "nothing is quarantined" in told
    assert not list(tmp_path.glob("*/.dcp-quarantined.json"))
    assert ranks.run(2, resume, root) == [(2, True)] * 2


def on_one_rank(root: str, act: Callable[[CheckpointManager], None], policy: Any) -> list[int]:
    with CheckpointManager(root, save_policy=policy) as manager:
        saved = []
        for step in range(1, 6):
            dist.barrier()
            if step == 3 and dist.get_rank() == 1:
                act(manager)
            if manager.maybe_save(step, sharded(step)):
                saved.append(step)
            if manager.preempted:
                break
        return saved


@pytest.mark.parametrize(
    ("act", "policy"),
    [
        (lambda manager: manager.request_save(), OnRequest()),
        (lambda manager: os.kill(os.getpid(), signal.SIGTERM), EverySteps(50) | OnSignal()),
    ],
    ids=["request", "SIGTERM"],
)
def test_what_one_rank_hears_all_do(ranks: Any, tmp_path: Path, act: Any, policy: Any) -> None:
    # Ranks that have left step 3 when they learn of it save in the next step.
    assert ranks.run(2, on_one_rank, str(tmp_path), act, policy) in ([[3], [3]], [[4], [4]])


def one_rank_fails(root: str) -> list[str]:
    with CheckpointManager(root, tolerated_failures=1) as manager:
        bad = {"own": Failing(OSError("its disk is gone"))} if dist.get_rank() == 1 else {}
        told = [str(manager.maybe_save(1, {**sharded(1), **bad}))]
        try:
            manager.maybe_save(2, {**sharded(2), **bad})
        except CheckpointException as error:
            told.append(str([*error.failures]))
        told.append(str(manager.maybe_save(3, sharded(3))))
    return told


def test_one_ranks_failure_is_everybodys(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, one_rank_fails, str(tmp_path)) == [["False", "[1]", "True"]] * 2
    assert steps(tmp_path) == {"step-3"}


class OneRankFailsSaver:
    """Its futures fail on the last rank only; the others' succeed."""

    def save(self, state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **place: Any) -> Future[Any]:
        done: Future[Any] = Future()
        if dist.get_rank() == dist.get_world_size() - 1:
            error: Exception = OSError("its disk is full") if state_dict["full"] else RuntimeError("a bug")
            done.set_exception(error)
        else:
            done.set_result(None)
        return done


def tell_one_by_one(root: str, full: bool, tolerated: int) -> list[str]:
    manager = CheckpointManager(root, saver=OneRankFailsSaver(), tolerated_failures=tolerated)
    told = []
    for step in range(1, 5):
        try:
            told.append(str(manager.maybe_save(step, {"full": full})))
        except CheckpointException as error:
            told.append(f"failed on {[*error.failures]}: {error}".splitlines()[0])
    return told


@pytest.mark.parametrize(
    ("full", "tolerated", "told"),
    [
        (True, 9, [True, True, True, True]),
        (True, 1, [True, True, 2, True]),
        (True, 0, [True, 1, True, 3]),
        (False, 9, [True, 1, True, 3]),
    ],
    ids=["tolerated", "tolerated once", "not tolerated", "a bug"],
)
def test_all_ranks_tolerate_the_same(ranks: Any, tmp_path: Path, full: bool, tolerated: int, told: list[Any]) -> None:
    first, second = ranks.run(2, tell_one_by_one, str(tmp_path), full, tolerated)
    assert first == second
    what = "failed on [1]: the save of step {} in the background failed (failed on rank 1)"
    for text, step in zip(first, told, strict=True):
        assert text == "True" if step is True else text.startswith(f"{what.format(step)}: ")


def state_fails_on_one_rank(root: str) -> str:
    def broken() -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise RuntimeError("no state today")
        return sharded(1)

    with CheckpointManager(root) as manager:
        try:
            manager.save(1, broken)
        except CheckpointException as error:
            return str(error)
    return "saved"


def test_a_state_that_fails_on_one_rank_fails_on_all(ranks: Any, tmp_path: Path) -> None:
    for told in ranks.run(2, state_fails_on_one_rank, str(tmp_path)):
        assert "rank 1" in told
        assert "no state today" in told
    assert steps(tmp_path) == set()
