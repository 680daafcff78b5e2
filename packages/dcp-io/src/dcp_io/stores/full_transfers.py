"""Complete transfers between buffers and an open file: system calls that transfer fewer bytes are repeated."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

__all__ = ["read_fully", "write_fully"]

Buffer = bytes | bytearray | memoryview

# One system call moves at most 1,024 buffers and 2 GiB - 4 KiB, and may move less.
PIECE_LIMIT = 1024
CALL_LIMIT_BYTES = (2 << 30) - 4096


def write_fully(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write all buffers at `offset` of a file; returns the number of bytes written.

    Raises:
        OSError: A system call failed, or wrote nothing.
    """
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
    """Fill the buffers from `offset` of a file; returns the number of bytes read, fewer only at the end of the file."""
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
    """Yield the buffers in order, split so that each batch fits one system call."""
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
    """Return the rest of a batch after its first `moved` bytes."""
    for position, buffer in enumerate(batch):
        if moved < len(buffer):
            return [memoryview(buffer)[moved:], *batch[position + 1 :]] if moved else batch[position:]
        moved -= len(buffer)
    return []
