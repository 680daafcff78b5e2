"""A pause of Python's cycle collector, for stretches that make very many records and no cycles.

Making 100,000 records triggers a full collection, which visits every object of the process: where torch is loaded that
takes longer than making the records. Memory that is not part of a cycle is freed as ever meanwhile.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from types import TracebackType

__all__ = ["collector_paused"]

_lock = threading.Lock()
_numbers = itertools.count()
_pauses: dict[int, bool] = {}
"""For each pause that is going on, whether the collector ran before it."""


class collector_paused:  # noqa: N801 - reads as `with collector_paused():`
    """Within the block no cycles are collected; after the last of several such blocks all is as before the first.

    That holds wherever an interrupt comes: a pause ends with this object at the latest.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._in_any_case = weakref.finalize(self, _end, self._number)
        self._in_any_case.atexit = False

    def __enter__(self) -> None:
        with _lock:
            _pauses[self._number] = gc.isenabled() or any(_pauses.values())
            gc.disable()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _end(self._number)
        self._in_any_case.detach()


def _end(number: int) -> None:
    """End a pause, unless it has ended; an interrupt in here leaves the rest to the next call."""
    with _lock:
        if _pauses.get(number) and len(_pauses) == 1:
            gc.enable()
        _pauses.pop(number, None)
