"""`make_pages`: the pages of untouched memory are made many at once, before it is filled.

A process that has just started loads into memory that nothing has touched. Without this, the kernel makes each page in
a fault of its own, and these take longer than the copy.

Source: Linux `madvise(2)`, `mincore(2)`.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["make_pages"]

_LEAST_BYTES = 1 << 20
_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE`, of Linux 5.14."""


def make_pages(buffer: memoryview) -> None:
    """Make the pages of a large writable buffer that is about to be overwritten, if its first one is missing.

    The contents do not change. Does nothing where the system cannot do it: then the pages are made one by one, later.
    """
    if len(buffer) < _LEAST_BYTES:
        return
    mincore, madvise = _calls()
    if mincore is None or madvise is None:
        return
    address: int = np.frombuffer(buffer, np.uint8).ctypes.data
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + len(buffer)) // mmap.PAGESIZE * mmap.PAGESIZE
    is_there = ctypes.c_ubyte()
    if mincore(start, mmap.PAGESIZE, ctypes.byref(is_there)) == 0 and not is_there.value & 1:
        madvise(start, stop - start, _POPULATE_WRITE)


@functools.cache
def _calls() -> tuple[Callable[..., int] | None, Callable[..., int] | None]:
    """Return `mincore` and `madvise`; None where the system has none."""
    try:
        library: Any = ctypes.CDLL(None)
        mincore, madvise = library.mincore, library.madvise
    except (AttributeError, OSError, TypeError):  # not Linux
        return None, None
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_ubyte))
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return mincore, madvise
