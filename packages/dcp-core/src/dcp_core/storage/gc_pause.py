"""Pause of Python's cyclic garbage collector while many records are created, which form no reference cycles.

Creating 100,000 records triggers a full collection, which visits all objects of the process; after `import torch` this
takes longer than creating the records. During the pause, reference counting still frees memory.
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
    """Context manager that disables the garbage collector inside the block; the last concurrent block restores it.

    If a signal handler raises, the collector is restored at the latest when the context manager is deleted.
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
