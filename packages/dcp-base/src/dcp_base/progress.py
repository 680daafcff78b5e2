"""Count the bytes of long operations in any thread, and report progress to observers a few times a second."""

from __future__ import annotations

import contextvars
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from dcp_base.hookspecs import CheckpointEvent
from dcp_base.registry import installed

INTERVAL_SECONDS = 0.15
"""Minimum interval between a phase's events."""


class Progress:
    """Counter of a phase's bytes on this rank: call it with a number of bytes. Thread-safe.

    `report`, if given, is called at most every `INTERVAL_SECONDS`, by one thread at a time.
    """

    def __init__(self, report: Callable[[int, int], object] | None) -> None:
        self._report = report
        self.wanted = report is not None
        """Whether bytes are counted."""
        self._lock, self._reporting = threading.Lock(), threading.Lock()
        self._next = time.monotonic() + INTERVAL_SECONDS
        self._done = self._expected = 0

    @property
    def done(self) -> int:
        """Bytes counted so far."""
        return self._done

    def expect(self, count: int) -> None:
        """Add to the expected bytes."""
        with self._lock:
            self._expected += count

    def __call__(self, count: int) -> None:
        """Add to the done bytes, and report if it is time."""
        if self._report is None:
            return
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + INTERVAL_SECONDS
        if self._reporting.acquire(blocking=False):  # a slow observer blocks only one thread
            try:
                done = self._done  # read under the lock, so that reports are in order
                self._report(done, max(done, self._expected))
            finally:
                self._reporting.release()


_NOBODY = Progress(None)
_current: contextvars.ContextVar[Progress] = contextvars.ContextVar("dcp_progress", default=_NOBODY)


def find_progress() -> Progress:
    """Return the counter of the phase in this context, or one that counts nothing.

    Call it in the phase's thread, and pass the result to threads that read or write.
    """
    return _current.get()


def _reporting(event: CheckpointEvent) -> Progress:
    def report(done: int, expected: int) -> None:
        installed.emit(replace(event, state="progress", bytes=done, expected_bytes=expected, time=time.time()))

    return Progress(report) if installed.observed else _NOBODY


@contextmanager
def count_progress(event: CheckpointEvent) -> Iterator[None]:
    """In the block, `find_progress` returns a counter for the phase that `event` started."""
    token = _current.set(_reporting(event))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def report_operation(operation: str, place: str | os.PathLike[str]) -> Iterator[Progress]:
    """Report the start, progress and end of an operation, such as a verification, as phase `total`.

    `place` is the path or URI. Call the yielded counter with done bytes.
    """
    if not installed.observed:
        yield _NOBODY
        return
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
