"""Deferral of signals such as SIGINT during short steps that must not be interrupted halfway."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["UninterruptedLock", "interrupts_deferred"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class interrupts_deferred:  # noqa: N801 - reads as `with interrupts_deferred():`
    """Context manager that defers signals: handlers written in Python run at the end of the block, not inside it.

    Use it for short blocks. In threads other than the main thread, where Python runs no signal handlers, it does
    nothing.

    Example:
        ```python
        import signal
        from dcp_ranks import interrupts_deferred

        seen = []
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            assert not seen
        assert seen == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ```
    """

    def __init__(self) -> None:
        self._noted: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number, frame in self._noted:
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append((number, frame))


class UninterruptedLock:
    """Re-entrant lock that defers signals while it is held, as `interrupts_deferred` does. Hold it for short blocks."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._deferred: list[interrupts_deferred] = []

    def __enter__(self) -> None:
        deferred = interrupts_deferred()
        deferred.__enter__()
        self._lock.acquire()
        self._deferred.append(deferred)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        deferred = self._deferred.pop()
        self._lock.release()
        deferred.__exit__(kind, error, traceback)
