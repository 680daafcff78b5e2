"""Registry of the memory files that this process has mapped: which file, and where in the file, a buffer is.

A memory file is a file without a name that lies in memory (Linux `memfd_create(2)`). A storage that has lent such
memory to a saver recognises the bytes that it is to store, and refers to them instead of copying them.
"""

from __future__ import annotations

import bisect
import mmap
import os
import threading
import weakref
from typing import NamedTuple

import numpy as np

__all__ = ["FileId", "find_mapping", "note_mapping"]

Buffer = bytes | bytearray | memoryview


class FileId(NamedTuple):
    """Identity of a file on this host, the same in all processes that have it open."""

    device: int
    inode: int


class _Mapping(NamedTuple):
    start: int
    stop: int
    file: FileId
    memory: weakref.ref[mmap.mmap]


_lock = threading.Lock()
_mappings: list[_Mapping] = []
"""Mappings that do not overlap, by address."""


def note_mapping(memory: mmap.mmap, descriptor: int) -> None:
    """Register memory of this process as a mapping of a memory file from the file's first byte on.

    The mapping is forgotten when `memory` is freed.

    Args:
        memory: The mapping.
        descriptor: File descriptor of the memory file, which may be closed afterwards.

    Example:
        ```python
        import mmap
        import os
        from dcp_io import find_mapping, note_mapping

        descriptor = os.memfd_create("example")
        os.ftruncate(descriptor, 8192)
        memory = mmap.mmap(descriptor, 8192)
        note_mapping(memory, descriptor)
        file, offset = find_mapping(memoryview(memory)[4096:])
        assert (file.inode, offset) == (os.fstat(descriptor).st_ino, 4096)
        os.close(descriptor)
        ```
    """
    status = os.fstat(descriptor)
    start = _address(memoryview(memory))
    made = _Mapping(start, start + len(memory), FileId(status.st_dev, status.st_ino), weakref.ref(memory))
    with _lock:
        _mappings[:] = [one for one in _mappings if one.memory() is not None and not _overlap(one, made)]
        bisect.insort(_mappings, made, key=lambda one: one.start)


def find_mapping(buffer: Buffer) -> tuple[FileId, int] | None:
    """Return the memory file that a buffer lies in, and the offset of its first byte; None if it lies in none.

    Args:
        buffer: One-dimensional contiguous buffer of bytes.
    """
    if not _mappings or not len(buffer):
        return None
    start = _address(buffer)
    with _lock:
        number = bisect.bisect_right(_mappings, start, key=lambda one: one.start) - 1
        found = _mappings[number] if number >= 0 else None
    if found is None or start + len(buffer) > found.stop or found.memory() is None:
        return None
    return found.file, start - found.start


def _address(buffer: Buffer) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _overlap(one: _Mapping, other: _Mapping) -> bool:
    return one.start < other.stop and other.start < one.stop
