"""`KeeperSource`: an open object of a keeper. Its bytes are read where they are, in mapped memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dcp_io import Source, Store
from dcp_manifest import CorruptCheckpointError
from dcp_memory.client.keepers import Connection

__all__ = ["BlobSource", "KeeperSource"]


class BlobSource(Source):
    """A small object, whose bytes came with the answer to `open`.

    Args:
        store: Store of the object.
        name: Name of the object.
        data: Its bytes.
    """

    __slots__ = ("_data",)

    brings_memory = True

    def __init__(self, store: Store, name: str, data: memoryview) -> None:
        super().__init__(store, name)
        self._data = data.toreadonly()

    def size(self) -> int:
        """Return the size of the object in bytes."""
        return len(self._data)

    def fetch(self, offset: int, size: int) -> memoryview:
        """Return bytes of the object, without a copy."""
        check_range(self._name, offset, size, len(self._data))
        return self._data[offset : offset + size]

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Copy bytes of the object."""
        check_range(self._name, offset, sum(map(len, buffers)), len(self._data))
        for buffer in buffers:
            buffer[:] = self._data[offset : offset + len(buffer)]
            offset += len(buffer)


class _Hold:
    """An object that the keeper keeps for this process, until it and every view of its bytes are gone."""

    __slots__ = ("__weakref__",)


class KeeperSource(Source):
    """An open object in segments.

    The keeper keeps its memory until `close`, and until no view that `fetch` has returned is referenced any more.

    Args:
        store: Store of the object.
        name: Name of the object.
        connection: Connection to the keeper.
        epoch: Number of the connection on which the object was opened.
        number: Number of the open object there.
        size: Size of the object.
        extents: Records of `wire.EXTENT`.
    """

    __slots__ = ("_connection", "_ends", "_epoch", "_extents", "_hold", "_size", "_windows")

    brings_memory = True

    def __init__(
        self,
        store: Store,
        name: str,
        connection: Connection,
        epoch: int,
        number: int,
        size: int,
        extents: memoryview,
    ) -> None:
        super().__init__(store, name)
        self._hold: _Hold | None = _Hold()
        end = weakref.finalize(self._hold, connection.link.release_later, epoch, number)
        end.atexit = False
        self._connection, self._epoch, self._size = connection, epoch, size
        self._extents: npt.NDArray[np.uint64] = np.frombuffer(extents, "<u8").reshape(-1, 3)
        self._ends = np.cumsum(self._extents[:, 2])
        self._windows: dict[int, memoryview] = {}

    def size(self) -> int:
        """Return the size of the object in bytes."""
        return self._size

    def fetch(self, offset: int, size: int) -> memoryview:
        """Return bytes of the object, without a copy where they lie in one extent."""
        check_range(self._name, offset, size, self._size)
        if not size:
            return memoryview(b"")
        first = self._extent_at(offset)
        if offset + size <= int(self._ends[first]):
            return self._view(first, offset, size)
        memory = memoryview(bytearray(size))
        self.read_into(offset, [memory])
        return memory.toreadonly()

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Copy bytes of the object from the mapped memory."""
        check_range(self._name, offset, sum(map(len, buffers)), self._size)
        for buffer in buffers:
            # Copies of arrays let other threads run, those of memoryviews do not.
            taken, at = np.frombuffer(buffer, np.uint8), 0
            while at < len(taken):
                number = self._extent_at(offset)
                count = min(len(taken) - at, int(self._ends[number]) - offset)
                taken[at : at + count] = np.frombuffer(self._view(number, offset, count), np.uint8)
                at += count
                offset += count

    def close(self) -> None:
        """Close the object."""
        self._windows = {}
        self._hold = None

    def _extent_at(self, offset: int) -> int:
        return int(np.searchsorted(self._ends, offset, "right"))

    def _view(self, number: int, offset: int, size: int) -> memoryview:
        """Return bytes of one extent."""
        inode, start, length = map(int, self._extents[number])
        start += offset - (int(self._ends[number]) - length)
        return self._window(inode)[start : start + size]

    def _window(self, inode: int) -> memoryview:
        found = self._windows.get(inode)
        if found is None:
            hold = self._hold
            if hold is None:
                raise ValueError(f"{self._name} was closed")
            whole = self._connection.segments.get(inode, self._epoch).mapped()
            found = np.asarray(_Window(whole, hold)).data
            self._windows[inode] = found
        return found


class _Window:
    """The array interface of a mapped segment; what numpy makes of it, and views of that, keep the object open."""

    __slots__ = ("__array_interface__", "hold", "memory")

    def __init__(self, memory: npt.NDArray[np.uint8], hold: _Hold) -> None:
        self.__array_interface__ = memory.__array_interface__
        self.memory, self.hold = memory, hold


def check_range(name: str, offset: int, size: int, total: int) -> None:
    """Raise CorruptCheckpointError if a range is not within an object of `total` bytes."""
    if offset + size > total:
        raise CorruptCheckpointError(
            f"the object ends at byte {total}, but {offset + size} bytes are needed: it is truncated",
            file=name,
            offset=offset,
        )
