"""Early write-back: files are written to the disk while further bytes are produced, which shortens the final fsync."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["start_writeback"]

_SYNC_FILE_RANGE_WRITE = 2


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Ask the kernel to begin writing a range of a file to its device; does not wait for it.

    This is only a hint: a system without support for it does nothing, and the caller must still call fsync, which
    reports errors of the device.

    Args:
        fd: File descriptor.
        offset: Start of the range in the file, bytes.
        length: Length of the range, bytes.
    """
    call = _sync_file_range()
    if call is not None and length > 0:
        call(fd, offset, length, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):  # not Linux
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = function
    return found
