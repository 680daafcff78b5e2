from __future__ import annotations

import threading
import time

import pytest

from dcp_io.workers import Cancelled, run_together

PATIENCE_SECONDS = 20.0


def test_a_single_task_runs_right_here():
    seen = []
    run_together([lambda stop: seen.append(threading.current_thread())])
    assert seen == [threading.current_thread()]
    with pytest.raises(KeyError):
        run_together([lambda stop: {}["x"]])


def test_all_tasks_run_at_the_same_time():
    barrier = threading.Barrier(4)
    run_together([lambda stop: barrier.wait(PATIENCE_SECONDS)] * 4)


def test_the_first_error_stops_the_others_and_is_raised():
    ended = []
    started = threading.Barrier(3)

    def work(stop):
        started.wait()
        until = time.monotonic() + PATIENCE_SECONDS
        try:
            while time.monotonic() < until:
                stop.check()
                time.sleep(0.001)
        except Cancelled:
            ended.append("stopped")
            raise

    def fail(stop):
        started.wait()
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        run_together([work, fail, work])
    assert ended == ["stopped", "stopped"]


def test_even_an_exit_in_a_thread_is_raised():
    def leave(stop):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        run_together([leave, lambda stop: None])


def test_an_interrupt_stops_all_and_is_raised(monkeypatch):
    ended = []

    def work(stop):
        until = time.monotonic() + PATIENCE_SECONDS
        try:
            while time.monotonic() < until:
                stop.check()
                time.sleep(0.001)
        finally:
            ended.append(1)

    real = threading.Thread.join
    calls = []

    def join(thread, timeout=None):
        if not calls:
            calls.append(thread)
            raise KeyboardInterrupt
        real(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(KeyboardInterrupt):
        run_together([work, work])
    assert ended == [1, 1]
