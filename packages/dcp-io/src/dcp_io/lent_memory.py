"""Protocols of memory that a store lends to a saver."""

from __future__ import annotations

import bisect
import mmap
import os
import threading
import weakref
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

__all__ = ["FileId", "LentMemory", "MemoryLender", "SupportsLending", "lender_of"]


class LentMemory(Protocol):
    """Protocol of a memory file that a store has lent to this process.

    An object that a `Sink` of the store wrote from it refers to the memory, even after `give_back`. So the bytes must
    not change once they have been written.
    """

    @property
    def descriptor(self) -> int:
        """File descriptor, which may be passed to another process."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of the memory file."""
        ...

    @property
    def memory(self) -> mmap.mmap:
        """The memory, mapped and noted with `FileId.note`. Its pages exist already."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the store has freed the memory, after it was given back."""
        ...

    def give_back(self) -> None:
        """End the loan: the store may lend the memory again, unless objects refer to it. May be called again."""
        ...


class MemoryLender(Protocol):
    """Protocol that lends the memory of a store to this process. Methods may be called from several threads."""

    def lend(self, nbytes: int, *, seconds: float) -> LentMemory:
        """Lend memory of at least `nbytes` bytes, until `give_back`.

        Memory that is lent again is the same object, so that mappings and pinned pages can be reused.

        Args:
            nbytes: Number of bytes, at least 1.
            seconds: Longest time to wait until removed objects free memory.

        Raises:
            OSError: The store has too little memory; the message has the sizes and the remedy.
        """
        ...

    def prepare(self, nbytes: int) -> None:
        """Prepare memory for the next `lend`; may be slow, and never raises."""
        ...


@runtime_checkable
class SupportsLending(Protocol):
    """Protocol of a store with memory in which savers may stage data."""

    def lender(self) -> MemoryLender:
        """Return the lender."""
        ...


def lender_of(store: object) -> MemoryLender | None:
    """Return the lender of a store's memory; None if it lends none."""
    return store.lender() if isinstance(store, SupportsLending) else None


Buffer = bytes | bytearray | memoryview


class FileId(NamedTuple):
    """Identity of a file on this host, the same in all processes that have it open."""

    device: int
    inode: int

    @staticmethod
    def note(memory: mmap.mmap, descriptor: int) -> None:
        """Register `memory` as a mapping of a memory file from the file's first byte on, until it is freed.

        The file descriptor may be closed afterwards.

        Example:
            ```python
            import mmap
            import os
            from dcp_io import FileId

            descriptor = os.memfd_create("example")
            os.ftruncate(descriptor, 8192)
            memory = mmap.mmap(descriptor, 8192)
            FileId.note(memory, descriptor)
            file, offset = FileId.find(memoryview(memory)[4096:])
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

    @staticmethod
    def find(buffer: Buffer) -> tuple[FileId, int] | None:
        """Return the memory file that a one-dimensional contiguous buffer lies in, and its offset there, or None."""
        if not _mappings or not len(buffer):
            return None
        start = _address(buffer)
        with _lock:
            number = bisect.bisect_right(_mappings, start, key=lambda one: one.start) - 1
            found = _mappings[number] if number >= 0 else None
        if found is None or start + len(buffer) > found.stop or found.memory() is None:
            return None
        return found.file, start - found.start


class _Mapping(NamedTuple):
    start: int
    stop: int
    file: FileId
    memory: weakref.ref[mmap.mmap]


_lock = threading.Lock()
_mappings: list[_Mapping] = []
"""Mappings that do not overlap, by address."""


def _address(buffer: Buffer) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _overlap(one: _Mapping, other: _Mapping) -> bool:
    return one.start < other.stop and other.start < one.stop
