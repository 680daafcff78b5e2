"""`TimedCall`: call of a storage in a thread of its own, with a deadline: a storage may hang instead of failing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["SILENT_AFTER_SECONDS", "TimedCall", "call_in_time"]

SILENT_AFTER_SECONDS = 30.0
"""Time after which a place that has not answered counts as unreachable, where others can do without it."""

T = TypeVar("T")

_hanging: dict[str, TimedCall[Any]] = {}
"""Place → call that has timed out. While it runs, no other call of the place starts, and later ones fail at once."""


class TimedCall(Generic[T]):
    """Call of a storage in a daemon thread; one that hangs holds up neither its caller nor the end of the process.

    It begins at once, unless an earlier call of the same place hangs.

    Args:
        place: URL of the place that is called.
        call: Function to call.

    Example:
        ```python
        from dcp_io import LocalStore, TimedCall

        store = LocalStore("run")
        store.make()
        call = TimedCall(store.url, store.list)
        assert list(call.result()) == []
        ```
    """

    def __init__(self, place: str, call: Callable[[], T]) -> None:
        self.place = place
        """URL of the place."""
        self._call = call
        self._done = threading.Event()
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._begun = False
        """Whether the thread runs or has run."""
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

    def result(self, *, forever: bool = False, seconds: float | None = None) -> T:
        """Wait for the result, and return it.

        Args:
            forever: Whether to wait as long as it takes; otherwise not at all while an earlier call of the same place
                hangs.
            seconds: Time in seconds to wait otherwise; None for `SILENT_AFTER_SECONDS`.

        Raises:
            TimeoutError: There is no result in time; the call goes on, and may be waited for again.
            BaseException: The error of the function.
        """
        earlier = None if self._begun else _hanging.get(self.place)
        if earlier is not None:
            earlier.wait(None if forever else 0.0)
        if not self._begun:
            self._begin()
        self.wait(None if forever else SILENT_AFTER_SECONDS if seconds is None else seconds)
        if self._error is not None:
            raise self._error
        return self._found[0]

    def wait(self, seconds: float | None) -> None:
        """Wait for the end of the call; raises TimeoutError after `seconds`, None for no limit."""
        if not self._done.wait(seconds):
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


def call_in_time(place: str, call: Callable[[], T]) -> T:
    """Return the result of a call of a storage; raises TimeoutError if it takes too long. See `TimedCall.result`."""
    return TimedCall(place, call).result()
