"""Defer signals such as SIGINT during short steps."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class interrupts_deferred:  # noqa: N801 - reads as `with interrupts_deferred():`
    """Defer signals during a short block: handlers written in Python run at its end, not inside it.

    The block also holds `lock`, if given. Outside the main thread, Python runs no signal handlers.

    Example:
        ```python
        import signal
        from dcp_ranks.interrupts import interrupts_deferred

        seen = []
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            assert not seen
        assert seen == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ```
    """

    def __init__(self, lock: AbstractContextManager[object] | None = None) -> None:
        self._lock = nullcontext() if lock is None else lock
        self._noted: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        self._lock.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.__exit__(kind, error, traceback)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number, frame in self._noted:
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append((number, frame))
