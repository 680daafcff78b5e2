"""Worker threads: the first error stops the other threads and is raised in the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

MAX_INFLIGHT_BYTES = 64 << 20
"""Default limit of the memory for all threads' buffers together."""

_current = threading.local()


class Cancelled(Exception):  # noqa: N818 - it ends a thread's work and never reaches a user
    """Ends a worker thread because another one failed."""


class StopSignal(threading.Event):
    """Asks the threads of a `run_together` to stop at their next `check`."""

    def check(self) -> None:
        """Raise Cancelled if set."""
        if self.is_set():
            raise Cancelled


def check_stop() -> None:
    """Raise Cancelled if the calling thread works for a `run_together` in which another thread has failed.

    A function that waits for data, which the failed thread may hold back, calls this several times a second.
    """
    stop: StopSignal | None = getattr(_current, "stop", None)
    if stop is not None:
        stop.check()


def run_together(tasks: Sequence[Callable[[StopSignal], None]]) -> None:
    """Run each task in its own thread (a single task in the calling thread), and wait for all of them.

    Tasks call `StopSignal.check` between steps. The first error is raised after every task has ended.
    """
    stop = StopSignal()
    if len(tasks) == 1:
        tasks[0](stop)
        return
    errors: list[BaseException] = []
    threads = [
        threading.Thread(target=_run, args=(task, stop, errors), name=f"dcp-io-{number}")
        for number, task in enumerate(tasks)
    ]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for thread in started:
            thread.join()
    except BaseException:
        stop.set()
        for thread in started:
            thread.join()
        raise
    if errors:
        raise errors[0]


def _run(task: Callable[[StopSignal], None], stop: StopSignal, errors: list[BaseException]) -> None:
    _current.stop = stop
    try:
        task(stop)
    except Cancelled:
        pass
    except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
        errors.append(error)
        stop.set()
