"""When the manager saves, what it does about signals and failures, and saves in the background."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcp_base.hookspecs import CheckpointEvent
from dcp_core import hookimpl, plugins, save
from dcp_manager import (
    CheckpointManager,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepLast,
    OnRequest,
    OnSignal,
    UnfinishedSaveError,
)
from integration_tests.manager.checkpoints import Failing, names, restored, state, steps


def test_failures_of_the_storage_can_be_tolerated(tmp_path: Path) -> None:
    full = {"bad": Failing(OSError("the disk is full"))}
    with CheckpointManager(tmp_path, tolerated_failures=2) as manager:
        assert manager.maybe_save(1, state(1))
        assert not manager.maybe_save(2, full)
        assert not manager.maybe_save(3, full)
        assert manager.maybe_save(4, state(4))
        assert not manager.maybe_save(5, full)
        assert not manager.maybe_save(6, full)
        with pytest.raises(OSError, match="full"):
            manager.maybe_save(7, full)
        with pytest.raises(RuntimeError, match="a bug"):
            manager.maybe_save(8, {"bad": Failing(RuntimeError("a bug"))})
    assert steps(tmp_path) == {"step-1", "step-4"}


def test_saves_by_time_and_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("dcp_manager.manager.time", SimpleNamespace(monotonic=lambda: now[0]))
    with CheckpointManager(tmp_path, save_policy=EverySeconds(20) | OnRequest()) as manager:
        assert not manager.maybe_save(1, state(1))
        manager.request_save()
        assert manager.maybe_save(2, state(2))
        assert not manager.maybe_save(3, state(3))
        now[0] += 25
        assert manager.maybe_save(4, state(4))
        assert not manager.maybe_save(5, state(5))


def test_signals_save_and_stop(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path, save_policy=EverySteps(100) | OnSignal()) as manager:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.maybe_save(1, state(1))
        assert not manager.preempted
        assert not manager.maybe_save(2, state(2))
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.maybe_save(3, state(3))
        assert manager.preempted
    assert signal.getsignal(signal.SIGTERM) is before
    assert restored(tmp_path) == 3


def test_a_second_signal_goes_to_who_listened_before(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with CheckpointManager(tmp_path, save_policy=OnSignal()):
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_need_the_main_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="main thread"):
        pool.submit(CheckpointManager, tmp_path, save_policy=OnSignal()).result()


class ThreadSaver:
    """As little as a saver can be."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.gate = threading.Event()

    def save(self, state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **place: Any) -> Future[Any]:
        copy = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state_dict.items()}

        def run() -> Any:
            self.gate.wait()
            return save(copy, no_dist=True, **place)

        return self.pool.submit(run)


def test_saves_in_the_background_are_settled_when_they_end(tmp_path: Path) -> None:
    saver = ThreadSaver()
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1), saver=saver) as manager:
        futures = [manager.save(step, state(step)) for step in (1, 2, 3)]
        assert not (tmp_path / "latest").exists()
        assert manager.latest() is None
        assert steps(tmp_path) == {"step-1", "step-2", "step-3"}  # none of them is taken for debris
        saver.gate.set()
        manager.wait()
        assert all(future is not None and future.done() for future in futures)
        assert manager.latest() == 3
    assert names(tmp_path) == {"latest", "step-3"}
    assert restored(tmp_path) == 3


def test_waiting_for_a_saver_has_an_end(tmp_path: Path) -> None:
    saver = ThreadSaver()
    manager = CheckpointManager(tmp_path, saver=saver, close_timeout_seconds=0.1)
    future = manager.save(4, state(4))
    assert future is not None
    with pytest.raises(UnfinishedSaveError, match=r"rank 0, .*step 4 .* 0\.1 s \(close_timeout_seconds\)"):
        manager.close()
    with pytest.raises(UnfinishedSaveError, match=r"0\.2 s"):
        manager.wait(0.2)
    saver.gate.set()
    manager.wait(60)
    manager.close()
    assert manager.latest() == 4


def test_after_a_signal_waiting_ends_with_the_time_that_is_left(tmp_path: Path) -> None:
    saver, policy = ThreadSaver(), EverySteps(1) | OnSignal()
    manager = CheckpointManager(
        tmp_path, save_policy=policy, saver=saver, preemption_timeout_seconds=1.5, close_timeout_seconds=3600
    )
    save(state(1), checkpoint_id=tmp_path / "step-1")
    manager.maybe_save(2, state(2))
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(UnfinishedSaveError, match=r"step 2 .*\(preemption_timeout_seconds\)"):
        manager.maybe_save(3, state(3))  # the one before holds it up
    assert manager.preempted
    with pytest.raises(UnfinishedSaveError, match=r"step 2 .*\(preemption_timeout_seconds\)"):
        manager.close()
    assert manager.latest() == 1
    saver.gate.set()
    manager.wait(60)
    assert manager.latest() == 2


class WaitingSaver(ThreadSaver):
    """Takes a save only when the one before has ended and been settled, like the policy `wait`."""

    last: Future[Any] | None = None

    def save(self, state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **place: Any) -> Future[Any]:
        if self.last is not None:
            self.gate.set()
            self.last.result()
            self.pool.submit(int).result()  # the only thread has come back from the manager's callback
            self.gate.clear()
        self.last = super().save(state_dict, process_group=process_group, no_dist=no_dist, **place)
        return self.last


def test_the_end_of_a_save_leaves_the_next_one_its_note(tmp_path: Path) -> None:
    saver = WaitingSaver()
    losses = {1: 5.0, 2: 1.0, 3: 3.0, 4: 4.0}
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1) | KeepBest(1, "loss"), saver=saver) as manager:
        for step, loss in losses.items():
            manager.save(step, state(step), metrics={"loss": loss})
        saver.gate.set()
        manager.wait()
        assert {record.step: dict(record.metrics) for record in manager.checkpoints()} == {
            2: {"loss": 1.0},
            4: {"loss": 4.0},
        }
    assert steps(tmp_path) == {"step-2", "step-4"}


def test_failures_in_the_background_are_raised_by_the_next_call(tmp_path: Path) -> None:
    saver = ThreadSaver()
    saver.gate.set()
    manager = CheckpointManager(tmp_path, saver=saver)
    future = manager.save(1, {"bad": object.__new__(type("Unpicklable", (), {"__reduce__": _refuse}))})
    assert future is not None
    assert future.exception() is not None
    assert manager._background.overdue(20, "", "") is None
    with pytest.raises(Exception, match="cannot travel"):
        manager.save(2, state(2))
    manager.save(3, state(3))
    manager.close()
    assert steps(tmp_path) == {"step-3"}


def _refuse(self: object) -> Any:
    raise TypeError("it cannot travel")


class FailingSaver:
    """Its saves end at once, some of them with a full disk."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.asked: list[int] = []

    def save(self, state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **place: Any) -> Future[Any]:
        step = int(place["checkpoint_id"].rpartition("-")[2])
        self.asked.append(step)
        done: Future[Any] = Future()
        if step in self.failing:
            done.set_exception(OSError(f"no room for step {step}"))
        else:
            done.set_result(None)
        return done


def test_failures_in_the_background_are_counted_when_they_have_ended(tmp_path: Path) -> None:
    saver = FailingSaver(1, 3, 4, 5)
    manager = CheckpointManager(tmp_path, saver=saver, tolerated_failures=2)
    assert all(manager.maybe_save(step, {}) for step in range(1, 6))
    with pytest.raises(OSError, match="step 5"):  # the third in a row
        manager.maybe_save(6, {})
    assert saver.asked == [1, 2, 3, 4, 5]
    assert manager.maybe_save(7, {})
    assert manager.maybe_save(8, {})
    manager.close()


@pytest.mark.parametrize("tolerated", [0, 3])
def test_the_last_save_begins_whatever_became_of_earlier_ones(
    tmp_path: Path, tolerated: int, caplog: pytest.LogCaptureFixture
) -> None:
    saver, policy = FailingSaver(10), EverySteps(10) | OnSignal()
    with CheckpointManager(tmp_path, save_policy=policy, saver=saver, tolerated_failures=tolerated) as manager:
        manager.maybe_save(10, {})
        os.kill(os.getpid(), signal.SIGTERM)
        if tolerated:
            assert manager.maybe_save(11, {})
            assert "step-10 failed: OSError: no room for step 10 (1 of 3 tolerated, training goes on)" in caplog.text
        else:
            with pytest.raises(OSError, match="step 10"):
                manager.maybe_save(11, {})
        assert manager.preempted
        assert saver.asked == [10, 11]


def test_each_failure_in_the_background_is_raised_once(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, saver=ThreadSaver())
    gate = manager._saver.gate  # type: ignore[union-attr]
    for step in (1, 2):
        manager.save(step, {"bad": object.__new__(type("Unpicklable", (), {"__reduce__": _refuse}))})
    gate.set()
    for _ in range(2):
        with pytest.raises(Exception, match="cannot travel"):
            manager.wait()
    manager.close()


def test_observers_hear_what_is_removed(tmp_path: Path) -> None:
    heard: list[str] = []

    class Observer:
        @hookimpl
        def dcp_on_event(self, event: CheckpointEvent) -> None:
            if event.operation == "manage":
                heard.append(f"{event.phase} {event.checkpoint_id}")

    plugins.register(Observer(), name="observer")
    try:
        with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
            for step in (1, 2):
                manager.save(step, state(step))
    finally:
        plugins.unregister("observer")
    assert heard == [f"remove {tmp_path}/step-1"]
