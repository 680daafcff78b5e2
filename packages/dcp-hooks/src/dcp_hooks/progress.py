"""Progress of long operations: bytes are counted in any thread, and reported to observers a few times a second.

`count_progress` sets the counter of a phase, and the code that reads or writes bytes gets this counter from
`find_progress`. So the functions between them, which other packages may define, need no argument for the counter.
Nothing is counted if events have no observer.
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
    """Counter of the bytes that one phase has read or written on this rank: call it with a number of bytes.

    Thread-safe.

    Args:
        report: Function that is called with the number of bytes done and the number of bytes expected in total, in the
            thread that has just counted, by one thread at a time. The first call comes after `INTERVAL_SECONDS`, and
            later calls are at least as far apart. With None, nothing is counted.

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
        """Whether bytes are counted, because there is a function to report them to."""
        return self._report is not None

    @property
    def done(self) -> int:
        """Number of bytes that have been counted."""
        return self._done

    def expect(self, count: int) -> None:
        """Add `count` to the number of bytes that are expected in total."""
        with self._lock:
            self._expected += count

    def __call__(self, count: int) -> None:
        """Add `count` to the number of bytes that are done, and report the progress if it is time to."""
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
    """Return the counter of the phase that runs in this context; without such a phase, a counter that counts nothing.

    Call the function in the thread of the phase, and pass the result to the threads that read or write bytes.
    """
    return _current.get()


def _reporting(event: CheckpointEvent) -> Progress:
    """Return a counter that reports progress of the phase whose start `event` is."""

    def report(done: int, expected: int) -> None:
        installed.emit(replace(event, state="progress", bytes=done, expected_bytes=expected, time=time.time()))

    return Progress(report) if installed.observed else _NOBODY


@contextmanager
def count_progress(event: CheckpointEvent) -> Iterator[None]:
    """Context manager: inside the block, `find_progress` returns a counter that reports the progress of a phase.

    Args:
        event: Event of the start of the phase; the progress events are copies with other `state` and `bytes`.
    """
    token = _current.set(_reporting(event))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def report_operation(operation: str, place: str | os.PathLike[str]) -> Iterator[Progress]:
    """Context manager that reports an operation of this process alone, such as a verification, to observers.

    Start, progress and end of the block are reported as events of the phase `total`.

    Args:
        operation: Name of the operation.
        place: Path or URI of the checkpoint, file or folder that the operation reads or writes.

    Yields:
        Counter that the operation must call with the bytes that are done; reads and writes are not counted by
        themselves.
    """
    place, mark = os.fspath(place), uuid.uuid4().hex
    event = CheckpointEvent(operation, "total", "started", 0, place, world_size=1, operation_id=mark, time=time.time())
    installed.emit(event)
    start = time.monotonic()
    progress = _reporting(event)
    try:
        yield progress
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        _end(event, "failed", start, error=message)
        raise
    _end(event, "finished", start, count=progress.done)


def _end(event: CheckpointEvent, state: str, start: float, *, count: int = 0, error: str | None = None) -> None:
    seconds = time.monotonic() - start
    end = replace(event, state=state, seconds=seconds, own_seconds=seconds, error=error, time=time.time())
    installed.emit(replace(end, bytes=count or None))
