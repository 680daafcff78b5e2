"""Pause of Python's garbage collector while many records are created (they form no cycles).

Creating 100,000 records triggers a full collection, which visits every object of the process: after an import of torch
this takes longer than creating the records. Reference counting still frees memory meanwhile.
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
"""For each running pause, whether the garbage collector was enabled before it."""


class collector_paused:  # noqa: N801 - reads as `with collector_paused():`
    """Disable the garbage collector within the block; the last of nested or concurrent blocks restores its state.

    An interrupt at any moment does not change that: a pause ends at the latest when this object is deleted.
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
    """End a pause, unless it has ended; after an interrupt in here the next call completes it."""
    with _lock:
        if _pauses.get(number) and len(_pauses) == 1:
            gc.enable()
        _pauses.pop(number, None)
