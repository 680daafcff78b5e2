"""Signal handlers that only note signals; decisions follow between two steps of the training."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterable
from typing import Any

__all__ = ["SignalWatch"]


class SignalWatch:
    """Notes signals of this process from `start` to `stop`, in place of the previous handlers.

    A second signal of a kind that ends the training goes to the handler that was there before: a sender that repeats it
    does not want to wait. Only those that this process has received count: a scheduler sends one to each rank, and the
    other ranks' may be heard of first.

    Args:
        numbers: Signals to note.
        stop_numbers: Of them, those that end the training.
    """

    def __init__(self, numbers: Iterable[int], stop_numbers: Iterable[int]) -> None:
        self._numbers = frozenset(numbers)
        self._stop_numbers = frozenset(stop_numbers)
        self._before: dict[int, Any] = {}
        self._noted: set[int] = set()
        self._received_stop = False
        self.stopped_at: float | None = None
        """When the first signal that ends the training came, here or (at the latest) elsewhere; monotonic clock."""

    def start(self) -> None:
        """Install the handlers. Raises ValueError outside of the main thread, where Python does not allow it."""
        if self._numbers and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can only be listened to from the main thread: make the manager there, or leave OnSignal out"
            )
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._note)

    def stop(self) -> None:
        """Restore the previous handlers. May be repeated."""
        for number, handler in self._before.items():
            with contextlib.suppress(ValueError, TypeError):  # not the main thread; a handler that C code has set
                signal.signal(number, handler)
        self._before = {}

    @property
    def noted(self) -> frozenset[int]:
        """Signals received since the last `clear`."""
        return frozenset(self._noted)

    def clear(self, numbers: Iterable[int]) -> None:
        """Forget signals that have been handled."""
        self._noted.difference_update(numbers)

    def heard_of_stop(self) -> None:
        """Note that some rank has received a signal to end the training; the first time counts."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()

    def seconds_left(self, seconds: float | None) -> float | None:
        """Return the rest of `seconds` since the signal to end, at least one; None without a signal or limit."""
        if self.stopped_at is None or seconds is None:
            return None
        return max(1.0, seconds - (time.monotonic() - self.stopped_at))

    def _note(self, number: int, frame: object) -> None:
        if number in self._stop_numbers:
            if self._received_stop:
                before = self._before.get(number)
                signal.signal(number, before if before is not None else signal.SIG_DFL)
                signal.raise_signal(number)
                return
            self._received_stop = True
            self.heard_of_stop()
        self._noted.add(number)
        del frame
