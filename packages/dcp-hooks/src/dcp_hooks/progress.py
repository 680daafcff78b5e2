"""Progress of long operations: bytes are counted in any thread, and reported to observers a few times a second.

`count_progress` sets the counter that the loops which move bytes find with `find_progress`: it is not passed through
the calls between them, which may be a third party's. Where nobody observes events, nothing is counted.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from dcp_hooks.hookspecs import CheckpointEvent
from dcp_hooks.registry import installed

__all__ = ["INTERVAL_SECONDS", "Progress", "count_progress", "find_progress", "report_operation"]

INTERVAL_SECONDS = 0.15
"""Least time between two progress events of one phase on one rank."""


class Progress:
    """Counter of the bytes that one phase has moved on this rank. Thread-safe.

    Args:
        report: Function that gets the bytes done and those expected in all; called in the thread that has just counted,
            in one at a time, at most every `INTERVAL_SECONDS` and not before that has passed. None counts nothing.

    Example:
        ```python
        from dcp_hooks import Progress

        progress = Progress(lambda done, expected: print(f"{done} of {expected} bytes"))
        progress.expect(3 << 20)
        for _ in range(3):
            progress(1 << 20)  # prints nothing in less than 0.15 s
        ```
    """

    def __init__(self, report: Callable[[int, int], object] | None) -> None:
        self._report = report
        self._lock, self._reporting = threading.Lock(), threading.Lock()
        self._next = time.monotonic() + INTERVAL_SECONDS
        self._done = self._expected = 0

    @property
    def wanted(self) -> bool:
        """Whether anybody gets to know of it."""
        return self._report is not None

    def expect(self, count: int) -> None:
        """Add to the number of bytes that are expected in all."""
        with self._lock:
            self._expected += count

    def __call__(self, count: int) -> None:
        """Count bytes as done."""
        if self._report is None:
            return
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + INTERVAL_SECONDS
            done, expected = self._done, max(self._done, self._expected)
        if self._reporting.acquire(blocking=False):  # a slow observer holds up one thread, not all
            try:
                self._report(done, expected)
            finally:
                self._reporting.release()


_NOBODY = Progress(None)
_current: contextvars.ContextVar[Progress] = contextvars.ContextVar("dcp_progress", default=_NOBODY)


def find_progress() -> Progress:
    """Return the counter of the operation that runs in this context; one that counts nothing if there is none.

    Call it in the thread of the operation, and pass the result to the threads that move bytes.
    """
    return _current.get()


def _reporting(event: CheckpointEvent) -> Progress:
    """Return a counter that reports progress of the phase whose start `event` is."""

    def report(done: int, expected: int) -> None:
        installed.emit(replace(event, state="progress", bytes=done, expected_bytes=expected, time=time.time()))

    return Progress(report) if installed.observed else _NOBODY


@contextmanager
def count_progress(event: CheckpointEvent) -> Iterator[None]:
    """Count what is read and written in this context for the phase whose start `event` is."""
    token = _current.set(_reporting(event))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def report_operation(operation: str, place: str | os.PathLike[str]) -> Iterator[Progress]:
    """Report the start, progress and end of an operation of this process alone, such as a verification.

    Args:
        operation: Name of the operation.
        place: Checkpoint, file or folder that it is about.

    Yields:
        The counter of its bytes: the operation counts itself, what it reads and writes on the way does not count.
    """
    place, mark = os.fspath(place), uuid.uuid4().hex
    event = CheckpointEvent(operation, "total", "started", 0, place, world_size=1, operation_id=mark, time=time.time())
    installed.emit(event)
    start = time.monotonic()
    try:
        yield _reporting(event)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        _end(event, "failed", start, error=message)
        raise
    _end(event, "finished", start)


def _end(event: CheckpointEvent, state: str, start: float, *, error: str | None = None) -> None:
    seconds = time.monotonic() - start
    installed.emit(replace(event, state=state, seconds=seconds, own_seconds=seconds, error=error, time=time.time()))
