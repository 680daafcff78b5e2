"""`OnSignal`: policy that saves on SIGTERM and other signals (preemption), and the handlers that record them.

A handler only records the signal. The manager reacts to the signal between two training steps.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dcp_manager.policies.saving_rules import Moment, SavePolicy

__all__ = ["OnSignal", "SignalWatch"]


@dataclass(frozen=True)
class OnSignal(SavePolicy):
    """Policy that saves when any rank has received one of the signals.

    Args:
        numbers: Set of the signals; by default SIGTERM and SIGUSR1.
        stop: Set of the signals that end the training: `manager.preempted` becomes true.

    Raises:
        TypeError: An argument is a single signal instead of a set.

    Example:
        ```python
        import signal
        from dcp_manager import CheckpointManager, OnSignal

        with CheckpointManager("run", save_policy=OnSignal({signal.SIGUSR1}, stop=set())) as manager:
            signal.raise_signal(signal.SIGUSR1)  # from outside: `kill -USR1 <pid>`
            assert manager.maybe_save(1, {"step": 1})
        ```
    """

    numbers: frozenset[int] = field(default=frozenset({signal.SIGTERM, signal.SIGUSR1}))
    stop: frozenset[int] = field(default=frozenset({signal.SIGTERM}))

    def __post_init__(self) -> None:
        for name, given in (("numbers", self.numbers), ("stop", self.stop)):
            if isinstance(given, int):
                raise TypeError(
                    f"OnSignal: {name} is {given!r}; give a set of signals, as in OnSignal({{signal.SIGUSR1}})"
                )
        object.__setattr__(self, "signals", frozenset(self.numbers))
        object.__setattr__(self, "stop_signals", frozenset(self.stop) & frozenset(self.numbers))

    def due(self, moment: Moment) -> bool:
        """Whether this process has received one of the signals."""
        return bool(self.signals & moment.signals)


class SignalWatch:
    """Recorder of signals to this process, which replaces their handlers from `start` to `stop`.

    If this process receives a second signal of `stop_numbers`, that signal goes to the previous handler: a sender that
    repeats itself does not want to wait. Only signals that this process received itself are counted: a scheduler
    signals every rank, and this process may learn of another rank's signal before its own arrives.

    Args:
        numbers: Signals to record.
        stop_numbers: The signals in `numbers` that end the training.
    """

    def __init__(self, numbers: Iterable[int], stop_numbers: Iterable[int]) -> None:
        self._numbers = frozenset(numbers)
        self._stop_numbers = frozenset(stop_numbers)
        self._before: dict[int, Any] = {}
        self._noted: set[int] = set()
        self._received_stop = False
        self.stopped_at: float | None = None
        """Monotonic time at which this process received, or learned of, the first signal that ends the training."""

    def start(self) -> None:
        """Install the signal handlers. Raises ValueError outside of the main thread, where Python allows none."""
        if self._numbers and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can only be listened to from the main thread: make the manager there, or leave OnSignal out"
            )
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._note)

    def stop(self) -> None:
        """Restore the previous signal handlers. Further calls do nothing."""
        for number, handler in self._before.items():
            with contextlib.suppress(ValueError, TypeError):  # not the main thread; a handler that C code has set
                signal.signal(number, handler)
        self._before = {}

    @property
    def noted(self) -> frozenset[int]:
        """Signals received since the last `clear`."""
        return frozenset(self._noted)

    def clear(self, numbers: Iterable[int]) -> None:
        """Remove signals that have been handled from the record."""
        self._noted.difference_update(numbers)

    def heard_of_stop(self) -> None:
        """Record the time at which this rank learns of a signal to end the training; later calls change nothing."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()

    def seconds_left(self, seconds: float | None) -> float | None:
        """Return how many of `seconds` seconds after the signal to end training are left, at least 1.

        None if `seconds` is None, or this rank knows of no such signal.
        """
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
