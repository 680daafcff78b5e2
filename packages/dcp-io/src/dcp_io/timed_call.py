"""Limits of time: `TimedCall`, of a storage's call that may hang, and `Pace`, of a rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_hanging: dict[str, TimedCall[Any]] = {}
"""Calls that have timed out, by place."""


class TimedCall(Generic[T]):
    """Call of a storage in a daemon thread; if it hangs, it delays neither its caller nor the end of the process.

    It begins immediately, unless an earlier call of the same `place` (a URL) hangs.
    """

    SILENT_AFTER_SECONDS = 30.0
    """Time after which a silent place counts as unreachable."""

    def __init__(self, place: str, call: Callable[[], T]) -> None:
        self.place = place
        self._call = call
        self._done = threading.Event()
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._begun = False
        earlier = _hanging.get(place)
        if earlier is not None and earlier.is_done:
            _hanging.pop(place, None)
            earlier = None
        if earlier is None:
            self._begin()

    @property
    def is_done(self) -> bool:
        """Whether the function has returned or failed."""
        return self._done.is_set()

    def result(self, *, forever: bool = False, timeout_seconds: float | None = None) -> T:
        """Return the result, or raise the function's error.

        With `forever`, waits as long as it takes. Otherwise waits `timeout_seconds` (None for `SILENT_AFTER_SECONDS`),
        but not at all while an earlier call of the place hangs, and raises TimeoutError for a late result; the call
        continues.
        """
        earlier = None if self._begun else _hanging.get(self.place)
        if earlier is not None:
            earlier.wait(None if forever else 0.0)
        if not self._begun:
            self._begin()
        self.wait(None if forever else self.SILENT_AFTER_SECONDS if timeout_seconds is None else timeout_seconds)
        if self._error is not None:
            raise self._error
        return self._found[0]

    def wait(self, timeout_seconds: float | None) -> None:
        """Wait for the end of the call; TimeoutError after `timeout_seconds`."""
        if not self._done.wait(timeout_seconds):
            _hanging[self.place] = self
            raise TimeoutError(f"{self.place} does not answer")

    def _begin(self) -> None:
        self._begun = True
        threading.Thread(target=self._run, name=f"dcp-io {self.place}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error
        finally:
            self._done.set()


class Pace:
    """Limit of a rate in bytes per second, None for none; each call waits until that many bytes may have passed."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._due = 0.0

    def __call__(self, count: int) -> None:
        """Wait until `count` more bytes are within the rate."""
        if self._rate is None:
            return
        self._due = max(self._due, time.monotonic()) + count / self._rate
        time.sleep(max(0.0, self._due - time.monotonic()))
