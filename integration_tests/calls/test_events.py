"""Observers hear of every phase, and the log names the slowest rank."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_core import hookimpl
from dcp_core.hookspecs import CheckpointEvent
from dcp_ranks.testing.group_store import group_store

REST_SECONDS = 3.0  # what the others do themselves takes milliseconds


class Observer:
    """Keeps what it hears; raises each time, which must hurt nobody."""

    def __init__(self) -> None:
        self.events: list[CheckpointEvent] = []

    @hookimpl
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        self.events.append(event)
        raise RuntimeError("an observer that fails")


class Slow:
    """Takes its time on one rank, on the way out and on the way in, from when all others have come there."""

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        self.store = group_store()  # now: connecting may take its time, which is not to be measured

    def state_dict(self) -> dict[str, Any]:
        self._rest("out")
        return {"x": torch.arange(1000.0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rest("in")

    def _rest(self, way: str) -> None:
        if dist.get_rank() != self.rank:
            self.store.set(f"{self.name} {way} {dist.get_rank()}", "here")
            return
        others = {*range(dist.get_world_size())} - {self.rank}
        self.store.wait([f"{self.name} {way} {other}" for other in others], timedelta(seconds=120))
        time.sleep(REST_SECONDS)


def observed(folder: str, slow_rank: int) -> tuple[list[CheckpointEvent], list[str]]:
    observer, lines = Observer(), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("dcp_core.events")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    dcp.plugins.register(observer, name="test-observer")
    try:
        dcp.save({"slow": Slow(f"save {folder}", slow_rank)}, checkpoint_id=folder)
        dcp.load({"slow": Slow(f"load {folder}", slow_rank)}, checkpoint_id=folder)
    finally:
        dcp.plugins.unregister("test-observer")
        log.removeHandler(handler)
        log.setLevel(before)
    return observer.events, lines


def test_every_phase_is_told_with_bytes_seconds_and_the_slowest_rank(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    found = ranks.run(3, observed, folder, 2)
    order = ["total", "plan", "plan", "write", "write", "total"]
    order += ["total", "plan", "plan", "read", "read", "load_state_dict", "load_state_dict", "total"]
    for rank, (events, _) in enumerate(found):
        assert [event.phase for event in events] == order
        assert {(event.rank, event.checkpoint_id) for event in events} == {(rank, folder)}
        assert [event.operation for event in events] == ["save"] * 6 + ["load"] * 8
        finished = {(event.operation, event.phase): event for event in events if event.state == "finished"}
        assert len(finished) == len(events) // 2
        plan, applied = finished["save", "plan"], finished["load", "load_state_dict"]
        for event in (plan, applied):
            assert event.slowest_rank == 2
            assert event.slowest_seconds is not None
            assert event.seconds is not None
            assert event.slowest_seconds >= REST_SECONDS
            assert event.seconds >= REST_SECONDS
        assert plan.own_seconds is not None
        assert (plan.own_seconds >= REST_SECONDS) == (rank == 2)
        assert finished["load", "read"].bytes == 4000
    written = [event.bytes or 0 for events, _ in found for event in events if event.phase == "write"]
    assert 4000 < sum(written) < 6000
    events, lines = found[0]
    seconds = events[2].slowest_seconds
    slowest = f"slowest: rank 2 ({seconds:.3f} s)"
    assert any(f"save of {folder}: plan finished" in line and slowest in line for line in lines)
    assert any("read finished" in line and "0.0 MB by this rank" in line for line in lines)
    assert found[1][1] == []


def test_failures_are_told_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    observer = Observer()
    dcp.plugins.register(observer, name="test-observer")
    try:
        with pytest.raises(dcp.CheckpointNotFoundError):
            dcp.load({"x": torch.zeros(1)}, checkpoint_id=tmp_path / "nowhere")
    finally:
        dcp.plugins.unregister("test-observer")
    assert [(event.phase, event.state) for event in observer.events] == [
        ("total", "started"),
        ("plan", "started"),
        ("plan", "failed"),
        ("total", "failed"),
    ]
    assert "CheckpointNotFoundError" in str(observer.events[-1].error)
    assert any("plan failed" in record.getMessage() and record.levelname == "WARNING" for record in caplog.records)
