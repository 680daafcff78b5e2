"""The worker dies, hangs or fails at any moment: that save fails and says why, the next one works."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_async import AsyncSaver, SaverDeadlineError, SaverOptions, WorkerLostError, WorkerOptions
from dcp_async.saver import shared_saver
from dcp_core import CheckpointException, load
from dcp_fs import FileSystemWriter
from dcp_ranks.testing.ranks import RankPool
from integration_tests.process_end import has_ended

PHASES = [
    "plan",
    pytest.param("global plan", marks=pytest.mark.slow),
    "write",
    pytest.param("results", marks=pytest.mark.slow),
    "publish",
]


class DyingWriter(FileSystemWriter):
    """Does something in one phase of the worker of one rank: is killed, hangs, runs out of disk."""

    def __init__(self, path: str, phase: str, victim: int, what: str = "kill") -> None:
        super().__init__(path)
        self.phase, self.victim, self.what = phase, victim, what

    def _at(self, phase: str) -> None:
        if phase != self.phase or self._rank != self.victim:
            return
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.what == "hang":
            time.sleep(60)
        raise OSError(28, "No space left on device")

    def prepare_local_plan(self, plan: Any) -> Any:
        self._at("plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        self._at("global plan")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._at("write")
        written = super().write_data(plan, planner)
        self._at("results")
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        self._at("publish")
        super().finish(metadata, results)


def _state(number: float) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {f"own.{rank}": torch.full((1000,), number), "both": torch.full((10,), number)}


def _loaded(folder: str) -> float:
    found = _state(-1)
    load(found, checkpoint_id=folder)
    values = {value for tensor in found.values() for value in tensor.tolist()}
    assert len(values) == 1
    return float(values.pop())


def _survive(folder: str, phase: str, victim: int) -> tuple[str, float, float]:
    """What a save raises whose worker dies, long before the timeout; what is there before and after the next save."""
    saver = shared_saver("process")
    saver.save(_state(1), checkpoint_id=folder).result()
    writer = DyingWriter(folder, phase, victim)
    error = saver.save(_state(2), storage_writer=writer).exception(timeout=250)
    dist.barrier()
    before = _loaded(folder)
    saver.save(_state(3), checkpoint_id=folder).result(timeout=250)
    return f"{type(error).__name__}: {error}", before, _loaded(folder)


@pytest.mark.parametrize("phase", PHASES)
def test_killed_at_every_phase(ranks: RankPool, tmp_path: Path, phase: str) -> None:
    victim = 0 if phase in ("global plan", "publish") else 1
    found = ranks.run(2, _survive, str(tmp_path / "checkpoint"), phase, victim, timeout_seconds=280)
    for rank, (told, before, after) in enumerate(found):
        assert (before, after) == (1.0, 3.0)
        if rank == victim:
            assert told.startswith("WorkerLostError")
            assert "SIGKILL" in told
            assert str(tmp_path) in told
        else:
            assert "PeerLostError" in told
            assert f"rank {victim} is gone" in told


def _killed_between_saves(folder: str, victim: int) -> float:
    saver = shared_saver("process")
    saver.save(_state(1), checkpoint_id=folder).result()
    worker = saver.backend.worker  # type: ignore[attr-defined]
    if dist.get_rank() == victim:
        os.kill(worker.pid, signal.SIGKILL)
        while not has_ended(worker.pid):
            time.sleep(0.001)
        worker.settle()  # the others are told when this rank notices it; a save that they begin before that is lost
    dist.barrier()
    saver.save(_state(2), checkpoint_id=folder).result(timeout=250)
    return _loaded(folder)


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_between_saves_nothing_is_lost(ranks: RankPool, tmp_path: Path, victim: int) -> None:
    assert ranks.run(2, _killed_between_saves, str(tmp_path / "checkpoint"), victim, timeout_seconds=280) == [2.0, 2.0]


def _out_of_space(folder: str) -> tuple[str, float]:
    saver = shared_saver("process")
    saver.save(_state(1), checkpoint_id=folder).result()
    worker = saver.backend.worker  # type: ignore[attr-defined]
    error = saver.save(_state(2), storage_writer=DyingWriter(folder, "write", 1, "full")).exception(timeout=250)
    assert isinstance(error, CheckpointException)
    assert list(error.failures) == [1]
    assert saver.backend.worker is worker
    assert worker.alive  # type: ignore[attr-defined]
    dist.barrier()
    return str(error), _loaded(folder)


def test_disk_full_in_the_worker(ranks: RankPool, tmp_path: Path) -> None:
    for told, value in ranks.run(2, _out_of_space, str(tmp_path / "checkpoint"), timeout_seconds=280):
        assert "No space left on device" in told
        assert value == 1.0


@pytest.mark.parametrize(
    ("what", "error"),
    [pytest.param("stop", WorkerLostError, marks=pytest.mark.slow), ("hang", SaverDeadlineError)],
)
def test_a_worker_that_hangs_is_ended(tmp_path: Path, what: str, error: type[Exception]) -> None:
    patient = SaverOptions(save_timeout_seconds=240.0)
    impatient = WorkerOptions(heartbeat_timeout_seconds=3.0)
    options = replace(patient, worker=impatient) if what == "stop" else replace(patient, save_timeout_seconds=4.0)
    with AsyncSaver("process", options=options) as saver:
        saver.warm_up()
        failed = saver.save(_state(1), storage_writer=DyingWriter(str(tmp_path / "a"), "write", 0, what))
        with pytest.raises(error, match=str(tmp_path / "a")):
            failed.result(timeout=250)
        saver.backend._options = patient  # type: ignore[attr-defined]  # on a busy machine the next one takes longer
        saver.save(_state(2), checkpoint_id=tmp_path / "b").result(timeout=250)
    assert _loaded(str(tmp_path / "b")) == 2.0


def test_failures_that_nobody_asked_about_are_raised_later(tmp_path: Path) -> None:
    saver = AsyncSaver("thread")
    saver.save(_state(1), storage_writer=DyingWriter(str(tmp_path / "a"), "write", 0, "full"))
    with pytest.raises(OSError, match="No space left"):
        saver.save(_state(2), checkpoint_id=tmp_path / "b")
    saver.save(_state(2), checkpoint_id=tmp_path / "b")
    saver.save(_state(3), storage_writer=DyingWriter(str(tmp_path / "a"), "publish", 0, "full"))
    with pytest.raises(OSError, match="No space left"):
        saver.close()
    assert _loaded(str(tmp_path / "b")) == 2.0
