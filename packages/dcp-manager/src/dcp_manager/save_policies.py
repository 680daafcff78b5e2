"""Policies for saving: when a save is due. They can be combined with `|`.

All managers of a process share one handler per signal, and may end in any order: the last one restores the earlier
handler. A handler that the program installs later stays. A forked child gets the earlier handlers back, so that
`terminate()` ends it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import FrameType
from typing import Any


@dataclass(frozen=True, slots=True)
class Moment:
    """State of the training after one step, as one rank sees it."""

    step: int
    seconds_since_save: float
    """Seconds since the last save, or since the manager was created."""
    signals: frozenset[int] = frozenset()
    """Signals that this process has received and the manager has not handled."""
    requested: bool = False
    """Whether this process has called `request_save` since the last save."""


class SavePolicy(ABC):
    """Base class of policies that decide whether a save is due."""

    same_everywhere = False
    """Whether the decision depends only on the step, so ranks need not communicate."""
    stays_due = False
    """Whether a save, once due, stays due until it is made. Ranks then communicate only when it is due: `due` is also
    called in another thread, with step 0, and the save may be one step late. A subclass that overrides `due` must set
    it again.
    """
    signals: frozenset[int] = frozenset()
    """Signals for which the manager must install handlers."""
    stop_signals: frozenset[int] = frozenset()
    """Those of `signals` that end the training."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "due" in cls.__dict__ and "stays_due" not in cls.__dict__:
            cls.stays_due = False

    @abstractmethod
    def due(self, moment: Moment) -> bool:
        """Return whether a save is due for this rank; a signal or request on any rank applies to all."""

    def __or__(self, other: SavePolicy) -> SaveAny:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return SaveAny((*parts_of(self), *parts_of(other)))


def parts_of(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    """Return the combined policies, or the policy itself."""
    return policy.policies if isinstance(policy, SaveAny) else (policy,)


@dataclass(frozen=True)
class SaveAny(SavePolicy):
    """Policy that saves when any of several policies decides to save."""

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        for name in ("same_everywhere", "stays_due"):
            object.__setattr__(self, name, all(getattr(policy, name) for policy in self.policies))
        for name in ("signals", "stop_signals"):
            object.__setattr__(self, name, frozenset().union(*(getattr(policy, name) for policy in self.policies)))

    def due(self, moment: Moment) -> bool:
        """See `SavePolicy.due`."""
        return any(policy.due(moment) for policy in self.policies)


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Policy that saves at each step that is a multiple of `steps`, from step `first` on.

    Example:
        ```python
        from dcp_manager import CheckpointManager, EverySteps

        with CheckpointManager("run", save_policy=EverySteps(2)) as manager:
            for step in range(1, 6):
                manager.maybe_save(step, {"step": step})
            assert [record.step for record in manager.checkpoints()] == [2, 4]
        ```
    """

    steps: int
    first: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.steps, Integral) or isinstance(self.steps, bool) or self.steps < 1:
            raise ValueError(f"EverySteps({self.steps!r}): a number of steps is a whole number of at least 1")
        if not isinstance(self.first, Integral) or isinstance(self.first, bool):
            raise TypeError(f"EverySteps({self.steps!r}, first={self.first!r}): a step is a whole number")
        object.__setattr__(self, "same_everywhere", True)

    def due(self, moment: Moment) -> bool:
        """See `SavePolicy.due`."""
        return moment.step >= self.first and moment.step % self.steps == 0


@dataclass(frozen=True)
class EverySeconds(SavePolicy):
    """Policy that saves when `seconds` seconds have passed since the last save, on the coordinator's clock.

    Example:
        ```python
        from dcp_manager import CheckpointManager, EverySeconds

        with CheckpointManager("run", save_policy=EverySeconds(600)) as manager:
            saved = manager.maybe_save(1, {"step": 1})
            assert not saved  # ten minutes have not passed
        ```
    """

    seconds: float
    stays_due = True

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, Real) or isinstance(self.seconds, bool) or not self.seconds > 0:
            raise ValueError(f"EverySeconds({self.seconds!r}): a time is a number of seconds, more than 0")

    def due(self, moment: Moment) -> bool:
        """See `SavePolicy.due`."""
        return moment.seconds_since_save >= self.seconds


@dataclass(frozen=True)
class OnRequest(SavePolicy):
    """Policy that saves when any rank has called `manager.request_save()`.

    Example:
        ```python
        from dcp_manager import CheckpointManager, OnRequest

        with CheckpointManager("run", save_policy=OnRequest()) as manager:
            manager.request_save()
            assert manager.maybe_save(1, {"step": 1})
        ```
    """

    stays_due = True

    def due(self, moment: Moment) -> bool:
        """See `SavePolicy.due`."""
        return moment.requested


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
    stays_due = True

    def __post_init__(self) -> None:
        for name, given in (("numbers", self.numbers), ("stop", self.stop)):
            if isinstance(given, int):
                raise TypeError(
                    f"OnSignal: {name} is {given!r}; give a set of signals, as in OnSignal({{signal.SIGUSR1}})"
                )
        object.__setattr__(self, "signals", frozenset(self.numbers))
        object.__setattr__(self, "stop_signals", frozenset(self.stop) & frozenset(self.numbers))

    def due(self, moment: Moment) -> bool:
        """See `SavePolicy.due`."""
        return bool(self.signals & moment.signals)


class SignalWatch:
    """Recorder of signals to this process, from `start` to `stop`.

    A second signal of `stop_numbers` goes to the earlier handler. Only this process's own signals count, because a
    scheduler signals every rank.
    """

    def __init__(self, numbers: Iterable[int], stop_numbers: Iterable[int]) -> None:
        self._numbers = frozenset(numbers)
        self._stop_numbers = frozenset(stop_numbers)
        self._noted: set[int] = set()
        self._received_stop = False
        self.stopped_at: float | None = None
        """Monotonic time of the first signal to end the training."""

    def start(self) -> None:
        """Install the handlers. Raises ValueError outside of the main thread."""
        if self._numbers and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can only be listened to from the main thread: make the manager there, or leave OnSignal out"
            )
        for number in sorted(self._numbers):
            _handler_of(number).watches.add(self)

    def stop(self) -> None:
        """Stop; the last watch of a signal restores the earlier handler. Idempotent."""
        for number in self._numbers:
            for handler in _handlers.get(number, ()):
                handler.watches.discard(self)
            _restore(number)

    @property
    def noted(self) -> frozenset[int]:
        """Signals since the last `clear`."""
        return frozenset(self._noted)

    def clear(self, numbers: Iterable[int]) -> None:
        """Forget handled signals."""
        self._noted.difference_update(numbers)

    def heard_of_stop(self) -> None:
        """Record that the training ends."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()

    def seconds_left(self, seconds: float | None) -> float | None:
        """Return how many of `seconds` are left since that time, at least 1; None without either."""
        if self.stopped_at is None or seconds is None:
            return None
        return max(1.0, seconds - (time.monotonic() - self.stopped_at))

    def note(self, number: int) -> bool:
        """Record a signal; return True for a second one that ends the training, which is not recorded."""
        if number in self._stop_numbers:
            if self._received_stop:
                return True
            self._received_stop = True
            self.heard_of_stop()
        self._noted.add(number)
        return False


# An earlier handler: a Python handler, `SIG_DFL` or `SIG_IGN`, or the `struct sigaction` of C code.
_Previous = Callable[[int, FrameType | None], Any] | int | bytes


class _Handler:
    def __init__(self, number: int) -> None:
        self.number = number
        self.previous = _present(number)
        # Weak, so that a manager that is dropped without `close` stops recording.
        self.watches: weakref.WeakSet[SignalWatch] = weakref.WeakSet()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        repeated = [watch.note(number) for handler in _handlers.get(number, ()) for watch in handler.watches]
        if repeated and not any(repeated):
            return
        previous = _living(self.previous)
        if _installed(number) is self:
            self.watches.clear()
            _set(number, previous)
            signal.raise_signal(number)
        elif callable(previous):  # a handler that was installed later has called this one, and wants to stay
            previous(number, frame)


# Larger than a `struct sigaction` of any system.
_ACTION_BYTES = 512

_handlers: dict[int, list[_Handler]] = {}
"""In order of installation; several only if the program installed its own between."""


def _installed(number: int) -> _Handler | None:
    there: Any = signal.getsignal(number)
    return there if isinstance(there, _Handler) else None


def _handler_of(number: int) -> _Handler:
    handler = _installed(number)
    if handler is None:
        handler = _Handler(number)
        signal.signal(number, handler)
    known = _handlers.setdefault(number, [])
    if handler not in known:
        known.append(handler)
    return handler


def _restore(number: int) -> None:
    handler = _installed(number)
    is_idle = handler is not None and not handler.watches
    if is_idle and threading.current_thread() is threading.main_thread():  # else it passes signals on until then
        _set(number, _living(handler))
    _handlers[number] = [each for each in _handlers.get(number, ()) if each.watches]


def _living(handler: Any) -> _Previous:
    """Return the first handler that is not an idle one of ours."""
    while isinstance(handler, _Handler) and not handler.watches:
        handler = handler.previous
    found: _Previous = handler
    return found


def _present(number: int) -> _Previous:
    handler = signal.getsignal(number)
    if handler is None:  # C code has installed it
        action = ctypes.create_string_buffer(_ACTION_BYTES)
        ctypes.CDLL(None).sigaction(number, None, action)
        return action.raw
    return handler


def _set(number: int, handler: _Previous) -> None:
    if isinstance(handler, bytes):
        signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).sigaction(number, handler, None)
    else:
        signal.signal(number, handler)


# The signal mask of each forking thread before the fork.
_forking = threading.local()


def _block_before_fork() -> None:
    """Block watched signals until a forked child has its own handlers."""
    watched = [number for number, handlers in _handlers.items() if handlers]
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched) if watched else None


def _unblock_after_fork() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _give_back_in_child() -> None:
    for number, handlers in _handlers.items():
        for handler in handlers:
            handler.watches.clear()
        _restore(number)
    _unblock_after_fork()


os.register_at_fork(before=_block_before_fork, after_in_parent=_unblock_after_fork, after_in_child=_give_back_in_child)
