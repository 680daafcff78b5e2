"""The worker's place in the machine, and what of it is seen in the trainer."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil
import pytest
import torch

from dcp_async import AsyncSaver, SaverOptions, WorkerOptions
from dcp_base.hookspecs import CheckpointEvent
from dcp_core import hookimpl, plugins


class Observer:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    @hookimpl
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        self.events.append((event.phase, event.state))


def test_priorities_affinity_events_and_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    core = min(os.sched_getaffinity(0))
    worker = WorkerOptions(nice=7, ionice=("idle", 0), cpu_affinity=(core,), torch_threads=1)
    observer = Observer()
    plugins.register(observer, name="observer")
    caplog.set_level(logging.INFO, "dcp_core")
    try:
        with AsyncSaver("process", options=SaverOptions(worker=worker)) as saver:
            saver.warm_up(state_dict={"w": torch.ones(3)})
            assert not observer.events
            pid = saver.backend.worker.pid  # type: ignore[attr-defined]
            process = psutil.Process(pid)
            assert process.nice() == min(psutil.Process().nice() + 7, 19)
            assert process.cpu_affinity() == [core]
            assert os.sched_getscheduler(pid) == os.SCHED_BATCH
            assert process.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
            saver.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a").result()  # type: ignore[union-attr]
    finally:
        plugins.unregister("observer")
    assert observer.events[0] == ("total", "started")
    assert observer.events[-1] == ("total", "finished")
    assert ("write", "finished") in observer.events
    assert any("write finished" in record.getMessage() for record in caplog.records)
