"""Observers hear of every phase and of the bytes within it, and the log names the slowest rank."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
import dcp_base
from dcp_base.descriptors import write_fully
from dcp_base.hookspecs import CheckpointEvent
from dcp_base.progress import INTERVAL_SECONDS
from dcp_core import events as core_events
from dcp_core import hookimpl
from integration_tests.kits.coordinators import group_store

REST_SECONDS = 3.0  # what the others do themselves takes milliseconds


class Observer:
    """Keeps what it hears; raises each time, which must hurt nobody."""

    def __init__(self) -> None:
        self.events: list[CheckpointEvent] = []

    @hookimpl
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        if event.state != "progress":  # which slow machines report
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


def own_seconds(found: list[tuple[list[CheckpointEvent], list[str]]], operation: str, phase: str) -> list[float]:
    """Each rank's own time in a phase."""
    ends = [event for events, _ in found for event in events if event.state == "finished"]
    return [event.own_seconds or 0 for event in ends if (event.operation, event.phase) == (operation, phase)]


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
        for phase in (("save", "plan"), ("load", "load_state_dict")):
            event = finished[phase]
            assert own_seconds(found, *phase)[event.slowest_rank or 0] >= REST_SECONDS
            assert (event.slowest_seconds or 0) >= REST_SECONDS
            # Rank 2 rests after the others have done their part: what they wait for is not their own.
            waited = (event.seconds or 0) - (0 if rank == 2 else event.own_seconds or 0)
            assert waited >= REST_SECONDS
        assert own_seconds(found, "save", "plan")[2] >= REST_SECONDS
        assert finished["load", "read"].bytes == 4000
    written = [event.bytes or 0 for events, _ in found for event in events if event.phase == "write"]
    assert 4000 < sum(written) < 6000
    events, lines = found[0]
    slowest = f"slowest: rank {events[2].slowest_rank} ({events[2].slowest_seconds:.3f} s)"
    assert any(f"save of {folder}: plan finished" in line and slowest in line for line in lines)
    assert any("read finished" in line and "0.0 MB by this rank" in line for line in lines)
    assert found[1][1] == []


def test_failures_are_told_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    observer = Observer()
    caplog.set_level(logging.INFO)
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
    # No warning: what would be logged is raised as well, and a job of many ranks would say it many times.
    assert not [one for one in caplog.records if one.name.startswith("dcp_core") and one.levelno > logging.INFO]
    (line,) = (record.getMessage() for record in caplog.records if " failed " in record.getMessage())
    assert "plan failed" in line


def failing(folder: str) -> list[str]:
    """The file system of each rank is full. Returns what is logged at INFO and above, of all loggers."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)

    def full(descriptor: int, *rest: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_fully(descriptor, *rest)

    state = {str(rank): dcp.PerRank(torch.arange(1000.0)) for rank in range(dist.get_world_size())}
    try:
        with mock.patch("dcp_io.stores.local_store.write_fully", full), pytest.raises(dcp.DcpError):
            dcp.save(state, checkpoint_id=folder)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    return lines


def test_one_rank_logs_a_failure_of_all(ranks: Any, tmp_path: Path) -> None:
    first, *others = ranks.run(3, failing, str(tmp_path / "c"))
    (line,) = (line for line in first if "failed" in line)
    assert "write failed" in line
    assert "failed on ranks 0-2" in line
    assert "No space left on device" in line
    assert others == [[], []]


def test_failures_outside_of_a_phase_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(RuntimeError, match="pass checkpoint_id="):
        dcp.load({"x": torch.zeros(1)})
    assert ["total failed" in record.getMessage() for record in caplog.records] == [True]


class Counts:
    """Keeps the progress that it hears of, who says so, and the bytes of each phase that has finished."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, int, int, int]] = []
        self.finished: dict[tuple[str, str], int] = {}

    @hookimpl
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        if event.state == "progress":
            assert event.bytes is not None
            assert event.expected_bytes is not None
            self.heard.append((event.operation, event.phase, event.rank, event.bytes, event.expected_bytes))
        elif event.state == "finished":
            self.finished[event.operation, event.phase] = event.bytes or 0


@contextmanager
def counted() -> Iterator[Counts]:
    """Progress at every step, instead of a few times a second."""
    counts = Counts()
    dcp.plugins.register(counts, name="counts")
    with mock.patch("dcp_base.progress.INTERVAL_SECONDS", 0):
        yield counts
    dcp.plugins.unregister("counts")


def progress_of_rank(folder: str) -> Counts:
    state = {"x": dcp.PerRank(torch.ones(3 << 20)), "small": dcp.PerRank([torch.ones(10) for _ in range(200)])}
    with counted() as counts:
        dcp.save(state, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)
    return counts


def test_each_rank_reports_its_own_bytes_up_to_all_of_them(ranks: Any, tmp_path: Path) -> None:
    nbytes = (12 << 20) + 200 * 40
    for rank, counts in enumerate(ranks.run(2, progress_of_rank, str(tmp_path / "checkpoint"))):
        heard = counts.heard
        assert {(operation, phase, by) for operation, phase, by, _, _ in heard} == {
            ("save", "write", rank),
            ("load", "read", rank),
        }
        for name, phase in (("save", "write"), ("load", "read")):
            done = [count for operation, _, _, count, _ in heard if operation == name]
            assert done == sorted(done)
            # A thread that counts while another one reports does not report: the last report may lack its bytes.
            assert 0 < done[-1] <= nbytes * 1.1
            assert nbytes <= counts.finished[name, phase] <= nbytes * 1.1
        assert {expected for operation, _, _, _, expected in heard if operation == "save"} == {nbytes}


@pytest.mark.parametrize("compression", ["planes", "zstd"])
def test_progress_counts_bytes_before_compression(compression: str, tmp_path: Path) -> None:
    with counted() as counts:
        writer = dcp.FileSystemWriter(tmp_path / "checkpoint", compression=compression)
        dcp.save({"x": torch.zeros(3 << 20)}, storage_writer=writer)
    assert len(counts.heard) > 2
    assert counts.heard[-1][-2:] == (12 << 20, 12 << 20)


def test_verifications_and_conversions_report_progress(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    dcp.save({"x": torch.zeros(3 << 20)}, checkpoint_id=folder)
    for operation, act in (
        ("verify", lambda: dcp.verify_checkpoint(folder)),
        ("convert", lambda: dcp.convert(folder, tmp_path / "model.safetensors")),
        ("convert", lambda: dcp.convert(folder, tmp_path / "again")),  # by what saves and loads, which is not counted
    ):
        with counted() as counts:
            act()
        assert {heard[:3] for heard in counts.heard} == {(operation, "total", 0)}
        assert counts.heard[-1][-2] >= 12 << 20  # a verification reads some bytes twice


def test_a_save_in_a_process_reports_progress_to_the_trainer(tmp_path: Path) -> None:
    counts = Counts()
    dcp.plugins.register(counts, name="counts")
    try:
        with dcp.AsyncSaver("process") as saver:
            future = saver.save({"x": torch.ones(3 << 20)}, storage_writer=Dawdling(tmp_path / "checkpoint"))
            assert isinstance(future, Future)
            future.result()
    finally:
        dcp.plugins.unregister("counts")
    assert counts.heard
    assert {heard[:3] for heard in counts.heard} == {("save", "write", 0)}


class Dawdling(dcp.FileSystemWriter):
    """A writer that takes longer than the time between two reports."""

    def _open(self, checkpoint_id: Any) -> Any:
        backend = super()._open(checkpoint_id)
        create = backend.store.create

        def dawdle(name: str, **options: Any) -> Any:
            time.sleep(2 * INTERVAL_SECONDS)
            return create(name, **options)

        backend.store.create = dawdle  # type: ignore[method-assign]
        return backend


NOT_SEEN = """
import sys, torch, dcp_all as dcp
dcp.save({"x": torch.ones(3), "n": 1}, checkpoint_id=sys.argv[1])
dcp.load({"x": torch.ones(3), "n": 1}, checkpoint_id=sys.argv[1])
print(sorted(name for name in sys.modules if name.startswith(("dcp_inspect", "dcp_telemetry"))))
"""


def test_a_save_that_nobody_watches_imports_no_observer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NOT_SEEN, str(tmp_path / "step-1")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    assert ran.stdout.strip() == "[]"


def test_without_observers_and_logs_an_operation_reports_nothing(tmp_path: Path) -> None:
    folder, state = tmp_path / "checkpoint", {"x": torch.ones(1 << 19)}
    nobody = mock.patch.object(dcp_base.installed, "_subscribed", ())  # an example plug-in observes
    nothing = mock.patch.object(core_events, "CheckpointEvent", side_effect=AssertionError)
    dcp_base.installed.list()
    with nobody, nothing, mock.patch.object(dcp_base.installed, "emit", side_effect=AssertionError):
        dcp.save(state, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)
        dcp.verify_checkpoint(folder)
        with pytest.raises(dcp.CheckpointNotFoundError):
            dcp.load(state, checkpoint_id=tmp_path / "nowhere")
    assert (core_events.write_rate(folder) or 0) > 0
