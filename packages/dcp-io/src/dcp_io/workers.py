"""Worker threads that fail together: the first error in any of them stops the others and is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

__all__ = ["Cancelled", "StopSignal", "run_together"]


class Cancelled(Exception):  # noqa: N818 - it ends a thread's work and never reaches a user
    """Raised in a thread whose work is cancelled, because another one failed."""


class StopSignal:
    """Signal to the threads of one `run_together` that one of them has failed."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Ask every thread to stop at its next `check`."""
        self._event.set()

    def check(self) -> None:
        """Raise Cancelled if the threads were asked to stop."""
        if self._event.is_set():
            raise Cancelled


def run_together(tasks: Sequence[Callable[[StopSignal], None]]) -> None:
    """Run every task in a thread of its own (a single one right here) until all have ended.

    Args:
        tasks: Each should call `check` of the signal it gets between its steps.

    Raises:
        BaseException: The first error of any task, once every task has ended. An interrupt of the calling thread
            stops them as an error does.
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
