"""Protocols of memory that a store lends to savers."""

from __future__ import annotations

import bisect
import mmap
import os
import threading
import weakref
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from dcp_manifest.types import Buffer


class LentMemory(Protocol):
    """Protocol of a memory file that a store has lent to this process.

    An object that a `Sink` of the store wrote from it refers to the memory, even after `give_back`. So written bytes
    must not change.
    """

    @property
    def descriptor(self) -> int:
        """File descriptor, for any process."""
        ...

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    @property
    def memory(self) -> mmap.mmap:
        """The memory, mapped and noted with `FileId.note`. Its pages exist."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the store has freed the memory."""
        ...

    def give_back(self) -> None:
        """End the loan: the store may lend the memory again, unless objects refer to it. May be called again."""
        ...


class MemoryLender(Protocol):
    """Protocol that lends a store's memory to this process. Methods may be called from several threads."""

    def lend(self, nbytes: int, *, timeout_seconds: float) -> LentMemory:
        """Lend memory of at least `nbytes` bytes (at least 1), until `give_back`.

        Memory that is lent again is the same object, so that mappings and pinned pages can be reused. Waits up to
        `timeout_seconds` until removed objects free memory. Raises OSError, with sizes and remedy, if it is short.
        """
        ...

    def prepare(self, nbytes: int) -> None:
        """Prepare memory for the next `lend`; may be slow, never raises."""
        ...


@runtime_checkable
class SupportsLending(Protocol):
    """Protocol of a store with memory for staging."""

    def lender(self) -> MemoryLender:
        """Return the lender."""
        ...


def lender_of(store: object) -> MemoryLender | None:
    """Return a store's lender; None without one."""
    return store.lender() if isinstance(store, SupportsLending) else None


class FileId(NamedTuple):
    """Identity of a file on this host, the same in all processes."""

    device: int
    inode: int

    @staticmethod
    def note(memory: mmap.mmap, descriptor: int) -> None:
        """Register `memory` as a mapping of a memory file, from its first byte on, until it is freed.

        The file descriptor may be closed afterwards.
        """
        status = os.fstat(descriptor)
        start = _address(memoryview(memory))
        made = _Mapping(start, start + len(memory), FileId(status.st_dev, status.st_ino), weakref.ref(memory))
        with _lock:
            _mappings[:] = [one for one in _mappings if one.memory() is not None and not _overlap(one, made)]
            bisect.insort(_mappings, made, key=lambda one: one.start)

    @staticmethod
    def find(buffer: Buffer) -> tuple[FileId, int] | None:
        """Return the memory file of a one-dimensional contiguous buffer, and the offset in it."""
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


def _address(buffer: Buffer) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _overlap(one: _Mapping, other: _Mapping) -> bool:
    return one.start < other.stop and other.start < one.stop
