"""The worker's process as the trainer sees it, with a process that does nothing or does not end."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from dcp_async.errors import SaverDeadlineError, WorkerLostError
from dcp_async.options import WorkerOptions
from dcp_async.savers import worker_handle as worker_process
from dcp_async.savers.worker_handle import WorkerProcess
from dcp_async.savers.worker_messages import Beat


class Started:
    """A worker that never reads, and the calls of `on_end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start = subprocess.Popen

        def sleeper(command: Any, **options: Any) -> Any:
            return start([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=options["pass_fds"])

        monkeypatch.setattr(worker_process.subprocess, "Popen", sleeper)
        self.ended = threading.Event()
        self.worker = WorkerProcess(WorkerOptions(heartbeat_timeout_seconds=0.2), self.ended.set)
        self.process = self.worker._process


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    made = Started(monkeypatch)
    yield made
    made.process.kill()
    made.process.wait(60)
    made.worker.close()


def test_a_message_that_nobody_takes_is_given_up(started: Started) -> None:
    with pytest.raises(WorkerLostError, match=r"took no message for 0\.2 s"):
        started.worker.send(b"x" * (16 << 20))
    assert not started.worker.alive
    assert started.ended.wait(60)


def test_whether_it_lives_is_seen_in_a_trainer_with_thousands_of_open_files(started: Started) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    end = fcntl.fcntl(started.worker._end, fcntl.F_DUPFD_CLOEXEC, 2000)
    try:
        started.worker._end, kept = end, started.worker._end
        assert started.worker.alive
        started.process.kill()
        started.process.wait(60)
        assert not started.worker.alive
    finally:
        started.worker._end = kept
        os.close(end)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_that_cannot_be_killed_is_given_up(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_KILL_GRACE_SECONDS", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(started.process, "kill", lambda: None)
        started.worker.kill()
        assert not started.worker.alive
        assert started.ended.is_set()
        started.worker.close()


def test_an_end_is_told_before_the_next_save_gets_its_number(started: Started) -> None:
    """Even if the thread that waits for the process has not run yet, or is calling `on_end` at the moment."""
    told, finish = threading.Event(), threading.Event()

    def tell() -> None:
        assert finish.wait(60)
        told.set()

    started.worker._on_end = tell
    started.worker.settle()  # it lives
    started.process.kill()
    while started.worker.alive:
        time.sleep(0.001)
    threading.Timer(0.1, finish.set).start()
    started.worker.settle()
    assert told.is_set()


def test_closing_wakes_up_a_thread_that_reads(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_TERM_GRACE_SECONDS", 0.1)
    raised: list[BaseException] = []

    def read() -> None:
        try:
            started.worker.read(time.monotonic() + 60, starts=True)
        except BaseException as error:
            raised.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    started.worker.close()
    reader.join(60)
    assert [type(error) for error in raised] == [WorkerLostError]


class Clock:
    """Clock and polls of a process that is stopped sometimes: each poll takes a set time, the last gets a message."""

    def __init__(self, *polls: float, hears: bool) -> None:
        self._polls, self._hears, self._now = [*polls], hears, 0.0
        self.waited_ms: list[float] = []

    def monotonic(self) -> float:
        return self._now

    def register(self, *_: Any) -> None: ...

    def poll(self, milliseconds: float) -> list[Any]:
        self.waited_ms.append(milliseconds)
        self._now += self._polls.pop(0)
        return [1] if self._hears and not self._polls else []


@pytest.mark.parametrize(
    ("clock", "seconds", "expected"),
    [
        (Clock(1.0, 1.0, 0.5, hears=True), 3.0, (True, 2.5)),
        (Clock(1.0, 1.0, 1.0, hears=False), 3.0, (False, 3.0)),
        (Clock(9999.0, 0.5, hears=True), 3.0, (True, 1.5)),
        (Clock(9999.0, 1.0, 0.25, hears=False), 2.25, (False, 2.25)),
        (Clock(0.25, hears=False), 0.25, (False, 0.25)),
    ],
)
def test_a_stop_of_this_process_is_no_silence_of_the_worker(
    started: Started, monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float, expected: tuple[bool, float]
) -> None:
    """SIGSTOP and SIGCONT of a whole job: the trainer wakes up long after its deadline, before the worker speaks."""
    with monkeypatch.context() as patched:
        patched.setattr(worker_process.select, "poll", lambda: clock)
        patched.setattr(worker_process.time, "monotonic", clock.monotonic)
        assert started.worker._listen(seconds) == expected
    assert max(clock.waited_ms) <= 1000


def test_signs_of_life_do_not_stop_the_clock(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = iter([(True, 0.4)] * 9)
    monkeypatch.setattr(started.worker, "_listen", lambda _: next(heard))
    monkeypatch.setattr(started.worker, "_receive", Beat)
    with pytest.raises(SaverDeadlineError):
        started.worker.read(time.monotonic() + 1.0)


def test_a_worker_that_nobody_holds_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Started(monkeypatch)
    theirs, gone = made.worker._connection, weakref.ref(made.worker)
    del made.worker
    assert gone() is None
    assert theirs.fileno() == -1
    made.process.kill()
    made.process.wait(60)
    assert not made.ended.is_set()  # nobody is there to be told
