"""A run is killed again and again at random moments, on changing world sizes, and its disk is full for a while.

Each time it must go on from the newest published checkpoint, and in the end there must be exactly what the keeping
policy says, and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dcp_core import DcpError
from dcp_core.testing.sharding import distribute
from dcp_io import verify_checkpoint
from dcp_io.stores.store import TEMPORARY_SUFFIX
from dcp_manager import CheckpointManager, EverySteps, KeepEvery, KeepLast

KEEP_LAST, KEEP_EVERY = 3, 10
# Of each hundred steps, those that meet a full disk.
FULL = range(60, 64)
ROWS = 512


def state(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(float(ROWS * 64)).reshape(ROWS, 64) + step
    return {"weight": distribute(full, mesh, [Shard(0)]), "step": step}


def manager(root: str) -> CheckpointManager:
    return CheckpointManager(
        root,
        save_policy=EverySteps(1),
        keep_policy=KeepLast(KEEP_LAST) | KeepEvery(KEEP_EVERY),
        tolerated_failures=1000,
        timeout_seconds=10,
    )


@contextlib.contextmanager
def full_disk(step: int) -> Iterator[None]:
    """Nothing can be written at some steps."""
    from dcp_io.stores import local_store as local

    real = local.write_fully

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if step % 100 in FULL:
        local.write_fully = refuse
    try:
        yield
    finally:
        local.write_fully = real


def train(root: str, until: int) -> tuple[int, int] | None:
    """Resume and save each step; the step resumed from, and the last one that was surely saved."""
    try:
        keeper = manager(root)
        template = state(-1)
        restored = keeper.restore(template)
    except (DcpError, RuntimeError):
        return None  # the other rank was killed before this one could resume
    first = 0 if restored is None else restored.step
    if restored is not None:
        wanted = state(first)
        assert template["step"] == first
        assert torch.equal(template["weight"].to_local(), wanted["weight"].to_local())
        assert restored.passed_over == (), "a published checkpoint was damaged"
    saved = first
    with contextlib.suppress(DcpError):  # the other rank is gone
        for step in range(first + 1, until + 1):
            with full_disk(step):
                if keeper.maybe_save(step, state(step)):
                    saved = step
    return first, saved


def published(root: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step-")) for path in root.glob("step-*/.metadata"))


@pytest.mark.timeout(1500)
@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, 40])
def test_killed_runs_resume_and_leave_no_debris(ranks: Any, tmp_path: Path, kills: int, record_property: Any) -> None:
    dice = random.Random(kills)
    sure, seen = 0, 0
    for _ in range(kills):
        world_size = dice.choice((1, 2))
        victim = dice.randrange(world_size)
        ends = ranks.run(
            world_size,
            train,
            str(tmp_path),
            1_000_000,
            kill_after_seconds={victim: dice.uniform(0.3, 2.0)},
            expect_death=[victim],
            timeout_seconds=90,
        )
        there = published(tmp_path)
        for end in ends:
            if end is not None:
                first, saved = end
                assert first >= sure, "a checkpoint that was reported as saved is lost"
                sure = saved
        newest = there[-1] if there else 0
        assert newest >= max(sure, seen), "a published checkpoint is gone"
        if there:
            assert verify_checkpoint(tmp_path / f"step-{newest}").ok
        seen = newest
    for path in tmp_path.rglob(f"*{TEMPORARY_SUFFIX}"):  # what is fresh may still be somebody's
        os.utime(path, (1000, 1000))
    last = seen + 5
    while last % 100 in (*FULL, FULL.stop, FULL.stop + 1):
        last += 5
    assert ranks.run(2, train, str(tmp_path), last) == [(seen, last)] * 2
    record_property("saves", last)
    check_what_is_left(tmp_path, last)


def check_what_is_left(root: Path, last: int) -> None:
    good = [step for step in range(1, last + 1) if step % 100 not in FULL]
    kept = {*good[-KEEP_LAST:], *(step for step in good if step % KEEP_EVERY == 0)}
    assert set(published(root)) == kept
    assert {path.name for path in root.iterdir()} == {"latest", *(f"step-{step}" for step in kept)}
    assert (root / "latest").read_text() == f"step-{last}\n"
    for step in kept:
        names = {path.name for path in (root / f"step-{step}").iterdir()}
        odd = {name for name in names if not name.endswith(".distcp")} - {".metadata", ".dcp-note.json"}
        assert odd == set(), f"step {step}"
        assert verify_checkpoint(root / f"step-{step}").ok


def slow_steps(root: str, begin: Callable[[], object]) -> tuple[bool, int]:
    """Train slowly until a signal ends it, for which the manager listens when `begin` is called."""
    from dcp_manager import OnSignal

    with CheckpointManager(root, save_policy=EverySteps(1000) | OnSignal(), preemption_timeout_seconds=60) as keeper:
        begin()
        for step in range(1, 1000):
            time.sleep(0.02)
            keeper.maybe_save(step, state(step))
            if keeper.preempted:
                return True, step
    return False, 0


def _terminate_rank_1(root: str) -> tuple[bool, int]:
    import os
    import signal
    import threading

    def begin() -> None:
        if dist.get_rank() == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    return slow_steps(root, begin)


def test_preemption_of_one_rank_saves_on_all(ranks: Any, tmp_path: Path) -> None:
    ends = ranks.run(2, _terminate_rank_1, str(tmp_path))
    assert ends[0] == ends[1]
    preempted, step = ends[0]
    assert preempted
    assert published(tmp_path) == [step]
    assert verify_checkpoint(tmp_path / f"step-{step}").ok
