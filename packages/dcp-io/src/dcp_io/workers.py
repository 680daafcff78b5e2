"""Worker threads: the first error in any thread stops the other threads and is raised in the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

__all__ = ["Cancelled", "StopSignal", "run_together"]


class Cancelled(Exception):  # noqa: N818 - it ends a thread's work and never reaches a user
    """Raised in a worker thread that is stopped because another thread failed."""


class StopSignal:
    """Stop signal for the threads of a `run_together` call, set when a thread fails."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Ask every thread to stop at its next `check`."""
        self._event.set()

    def check(self) -> None:
        """Raise Cancelled if the stop signal is set."""
        if self._event.is_set():
            raise Cancelled


def run_together(tasks: Sequence[Callable[[StopSignal], None]]) -> None:
    """Run each task in its own thread (a single task in the calling thread), and wait for all of them.

    Args:
        tasks: Functions to run. Each gets the stop signal, and should call `StopSignal.check` between its steps.

    Raises:
        BaseException: The first error of any task, raised after every task has ended. A KeyboardInterrupt in the
            calling thread stops the tasks like an error.
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
    try:
        task(stop)
    except Cancelled:
        pass
    except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
        errors.append(error)
        stop.set()
