"""System calls: an interrupt-safe `open`, complete transfers, and calls that are missing from `os`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Buffer = bytes | bytearray | memoryview


def open_descriptor(path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
    """Open a file like `os.open`, but leave no descriptor and no new file if a signal handler raises.

    With `os.open` alone, a KeyboardInterrupt can be raised before the descriptor is assigned. After an interrupt, a
    file created with `O_EXCL` is removed again.
    """
    opened: list[int] = []
    try:
        opened.extend(map(os.open, (path,), (flags,), (mode,)))  # a single bytecode step
        return opened[0]
    except BaseException:
        for descriptor in opened:
            os.close(descriptor)
            if flags & os.O_EXCL:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        raise


@functools.cache
def kernel_call(name: str, *types: Any) -> Callable[..., int] | None:
    """Return a C library function with an int result and `errno` (see `ctypes.get_errno`); None if missing."""
    try:
        function: Any = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):  # not Linux
        return None
    function.argtypes, function.restype = types, ctypes.c_int
    found: Callable[..., int] = function
    return found


# One system call moves at most 1,024 buffers and 2 GiB - 4 KiB, and may move less.
PIECE_LIMIT = 1024
CALL_LIMIT_BYTES = (2 << 30) - 4096


def write_fully(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write all buffers at `offset`; returns the number of bytes. Raises OSError."""
    if len(buffers) == 1 and 0 < len(buffers[0]) <= CALL_LIMIT_BYTES:  # nearly always; a partial write goes on below
        written = os.pwritev(fd, buffers, offset)
        if written == len(buffers[0]):
            return written
        buffers = [memoryview(buffers[0])[written:]] if written else buffers
    else:
        written = 0
    for batch in _batches(buffers):
        while batch:
            moved = os.pwritev(fd, batch, offset + written)
            if moved == 0:
                raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
            written += moved
            batch = _rest(batch, moved)
    return written


def read_fully(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill the buffers from `offset`; returns the number of bytes, fewer only at the end of the file."""
    if len(buffers) == 1 and 0 < len(buffers[0]) <= CALL_LIMIT_BYTES:  # nearly always; a partial read goes on below
        read = os.preadv(fd, buffers, offset)
        if read in (0, len(buffers[0])):
            return read
        buffers = [buffers[0][read:]]
    else:
        read = 0
    for batch in _batches(buffers):
        while batch:
            moved = os.preadv(fd, batch, offset + read)
            if moved == 0:
                return read
            read += moved
            batch = _rest(batch, moved)
    return read


def _batches(buffers: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    batch: list[Buffer] = []
    room = CALL_LIMIT_BYTES
    for buffer in buffers:
        size = len(buffer)
        start = 0
        while start < size:
            part = buffer if start == 0 and size <= room else memoryview(buffer)[start : start + room]
            batch.append(part)
            start += len(part)
            room -= len(part)
            if room == 0 or len(batch) == PIECE_LIMIT:
                yield batch
                batch, room = [], CALL_LIMIT_BYTES
    if batch:
        yield batch


def _rest(batch: list[Buffer], moved: int) -> list[Buffer]:
    for position, buffer in enumerate(batch):
        if moved < len(buffer):
            return [memoryview(buffer)[moved:], *batch[position + 1 :]] if moved else batch[position:]
        moved -= len(buffer)
    return []
