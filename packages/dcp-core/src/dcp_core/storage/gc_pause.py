"""A pause of Python's cycle collector, for stretches that make very many records and no cycles.

Making 100,000 records triggers a full collection, which visits every object of the process: where torch is loaded that
takes longer than making the records. Memory that is not part of a cycle is freed as ever meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["collector_paused"]

_lock = threading.Lock()
_pauses: list[bool] = []
"""For each pause that is going on, whether the collector ran before it."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Within the block no cycles are collected; after the last of several such blocks all is as before the first."""
    with _lock:
        _pauses.append(gc.isenabled() or any(_pauses))
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            ran = _pauses.pop()
            if ran and not _pauses:
                gc.enable()
