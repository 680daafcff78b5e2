"""The worker's process as the trainer sees it, with a process that does nothing or does not end."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dcp_async import worker_process
from dcp_async.errors import WorkerLostError
from dcp_async.options import WorkerOptions
from dcp_async.worker_process import WorkerProcess


class Started:
    """A worker that never reads, and what was told of its end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start = subprocess.Popen

        def sleeper(command: Any, **options: Any) -> Any:
            return start([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=options["pass_fds"])

        monkeypatch.setattr(worker_process.subprocess, "Popen", sleeper)
        self.ended = threading.Event()
        self.worker = WorkerProcess(WorkerOptions(silence_seconds=0.2), self.ended.set)
        self.process = self.worker._process


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    made = Started(monkeypatch)
    yield made
    made.process.kill()
    made.process.wait(60)
    made.worker.close()


@pytest.mark.timeout(30)
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


@pytest.mark.timeout(30)
def test_a_process_that_cannot_be_killed_is_given_up(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_KILL_SECONDS", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(started.process, "kill", lambda: None)
        started.worker.kill()
        assert not started.worker.alive
        assert started.ended.is_set()
        started.worker.close()


@pytest.mark.timeout(30)
def test_an_end_is_told_before_the_next_save_gets_its_number(started: Started) -> None:
    """Though the thread that waits for the process may not have had its turn yet, or be telling it just now."""
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


@pytest.mark.timeout(30)
def test_closing_wakes_up_a_thread_that_reads(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_TERM_SECONDS", 0.1)
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
