"""Objects of a keeper: `KeeperSink` writes a new one, `KeeperSource` reads an open one from mapped memory."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_io import Sink, Source
from dcp_io.lent_memory import FileId
from dcp_manifest import CorruptCheckpointError
from dcp_manifest.types import Buffer
from dcp_memory.client.connection import FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS, Connection, MemoryFile
from dcp_memory.client.link import Answer
from dcp_memory.wire import PAGE_BYTES

SMALL_BYTES = 256 << 10
"""Limit of an object outside segments, and of bytes collected before a write."""
_FIRST_BYTES = 64 << 10
_MOST_BYTES = 64 << 20
_REFERRED_BYTES = 4096


class Writing:
    """An object that is being written; creating it raises FileExistsError if the key is taken."""

    def __init__(self, connection: Connection, options: Mapping[str, Any], key: str | None, name: str) -> None:
        self._connection, self._link = connection, connection.link
        self.name = name
        answer = self._link.insist(options, {"do": "create", "key": key})
        self._epoch = answer.epoch
        if answer.fields.get("error") == "exists":
            raise FileExistsError(errno.EEXIST, "the object exists, or is being written", f"{self._link.name}/{key}")
        self._id = answer.fields["id"]
        self._extents = array("Q")
        self._known: dict[FileId, bool] = {}
        self._file: MemoryFile | None = None
        self._at = self._stop = 0
        # Small buffers that are not yet written: they end at `_at`; of an object without extents, all of its bytes.
        self._collected = bytearray()
        self._grow_bytes = _FIRST_BYTES
        self.size = 0

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append buffers; refer to large ones in lent memory."""
        for buffer in buffers:
            size = len(buffer)
            found = FileId.find(buffer) if size >= _REFERRED_BYTES else None
            if found is not None and self._is_lent(found[0]):
                self._place_first()
                self._add(found[0].inode, found[1], size)
            elif size > SMALL_BYTES:
                self._place_first()
                self._flush()
                self._copy(buffer)
            elif self._extents:
                self._place(buffer)
            else:
                self._collected += buffer
                if len(self._collected) > SMALL_BYTES:
                    self._place_first()
            self.size += size

    def commit(self, key: str | None = None) -> None:
        """Complete the object under the reserved key, or replace the object of `key`."""
        if not self._extents and key is None:
            self._ask({"do": "commit", "id": self._id, "small": True}, self._collected)
            return
        self._place_first()
        self._flush()
        left = (self._stop - self._at) // PAGE_BYTES * PAGE_BYTES
        fields = {"do": "commit", "id": self._id, "small": False, "size": self.size, "left": left}
        self._ask({**fields, "key": key}, memoryview(self._extents).cast("B"))
        self._file = None

    def drop(self) -> None:
        """Free memory and key, if the keeper still runs."""
        self._file = None
        with contextlib.suppress(OSError):
            self._ask({"do": "drop", "id": self._id})

    def _is_lent(self, file: FileId) -> bool:
        known = self._known.get(file)
        if known is None:
            answer = self._ask({"do": "refer", "id": self._id, "device": file.device, "inode": file.inode})
            known = self._known[file] = bool(answer.fields["refers"])
        return known

    def _add(self, inode: int, offset: int, size: int) -> None:
        extents = self._extents
        if extents and extents[-3] == inode and extents[-2] + extents[-1] == offset:
            extents[-1] += size
        else:
            extents.extend((inode, offset, size))

    def _place_first(self) -> None:
        if not self._extents and self._collected:
            collected, self._collected = self._collected, bytearray()
            self._place(collected)

    def _place(self, buffer: Buffer) -> None:
        left = memoryview(buffer)
        while left:
            if self._at == self._stop:
                self._flush()
                self._extend(len(left))
            count = min(len(left), self._stop - self._at)
            self._add(self._opened().inode, self._at, count)
            self._collected += left[:count]
            self._at += count
            left = left[count:]
        if len(self._collected) > SMALL_BYTES:
            self._flush()

    def _flush(self) -> None:
        collected, self._collected = memoryview(self._collected), bytearray()
        at = self._at - len(collected)
        while collected:
            written = os.pwrite(self._opened().descriptor, collected, at)
            at += written
            collected = collected[written:]

    def _opened(self) -> MemoryFile:
        if self._file is None:
            raise ValueError(f"{self.name} was closed")
        return self._file

    def _copy(self, buffer: Buffer) -> None:
        """Copy by writing to the file, which costs no faults for existing pages."""
        left = memoryview(buffer)
        while left:
            if self._at == self._stop:
                self._extend(len(left))
            file = self._opened()
            written = os.pwrite(file.descriptor, left[: self._stop - self._at], self._at)
            self._add(file.inode, self._at, written)
            self._at += written
            left = left[written:]

    def _extend(self, wanted: int) -> None:
        nbytes = min(max(self._grow_bytes, min(wanted, _MOST_BYTES)), _MOST_BYTES)
        self._grow_bytes = min(2 * self._grow_bytes, _MOST_BYTES)
        pause = FIRST_POLL_SECONDS
        while (answer := self._ask({"do": "extend", "id": self._id, "nbytes": nbytes})).fields.get("wait"):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
        inode = answer.fields["segment"]
        if self._file is None or self._file.inode != inode:
            self._file = self._connection.segments.get(inode, self._epoch)
        self._at = answer.fields["offset"]
        self._stop = self._at + answer.fields["nbytes"]

    def _ask(self, fields: Mapping[str, Any], payload: bytes | bytearray | memoryview = b"") -> Answer:
        return self._link.ask(fields, memoryview(payload), epoch=self._epoch)


class KeeperSink(Sink):
    """A new object, which refers to buffers in lent memory: they must not change any more."""

    def __init__(self, name: str, writing: Writing, remove: Callable[[], object]) -> None:
        self._name = name
        self._writing: Writing | None = writing
        self._remove: Callable[[], object] | None = remove

    @property
    def name(self) -> str:
        """Name of the object."""
        return self._name

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append the buffers."""
        self._open().write(buffers)

    def close(self) -> None:
        """Complete the object; memory cannot be durable."""
        if self._writing is not None:
            self._writing.commit()
            self._writing = None

    def abort(self) -> None:
        """Abort the write, or remove the object."""
        writing, self._writing = self._writing, None
        remove, self._remove = self._remove, None
        if writing is not None:
            writing.drop()
        elif remove is not None:
            remove()

    def _open(self) -> Writing:
        if self._writing is None:
            raise ValueError(f"{self._name} was closed")
        return self._writing


class BlobSource(Source):
    """A small object, with the bytes of the answer to `open`."""

    __slots__ = ("_data", "_name")

    def __init__(self, name: str, data: memoryview) -> None:
        self._name = name
        self._data = data.toreadonly()

    def size(self) -> int:
        """Return the size in bytes."""
        return len(self._data)

    def fetch(self, offset: int, size: int) -> memoryview:
        """Return bytes without a copy."""
        check_range(self._name, offset, size, len(self._data))
        return self._data[offset : offset + size]

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Copy bytes of the object."""
        check_range(self._name, offset, sum(map(len, buffers)), len(self._data))
        for buffer in buffers:
            buffer[:] = self._data[offset : offset + len(buffer)]
            offset += len(buffer)

    def close(self) -> None:
        """Do nothing."""


class _Hold:
    """Reference to an object, until it and all views of its bytes are gone."""

    __slots__ = ("__weakref__",)


class KeeperSource(Source):
    """An open object in segments. The keeper keeps it until it is closed and all views from `fetch` are gone."""

    __slots__ = ("_connection", "_ends", "_epoch", "_extents", "_hold", "_name", "_size", "_windows")

    def __init__(
        self,
        name: str,
        connection: Connection,
        epoch: int,
        number: int,
        size: int,
        extents: memoryview,
    ) -> None:
        self._name = name
        self._hold: _Hold | None = _Hold()
        end = weakref.finalize(self._hold, connection.link.release_later, epoch, number)
        end.atexit = False
        self._connection, self._epoch, self._size = connection, epoch, size
        self._extents: npt.NDArray[np.uint64] = np.frombuffer(extents, "<u8").reshape(-1, 3)
        self._ends = np.cumsum(self._extents[:, 2])
        self._windows: dict[int, memoryview] = {}

    def size(self) -> int:
        """Return the size in bytes."""
        return self._size

    def fetch(self, offset: int, size: int) -> memoryview:
        """Return bytes, without a copy if they lie in one extent."""
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
        """Copy bytes from the mapped memory."""
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
    """Array interface of a mapped segment; arrays made of it keep the object open."""

    __slots__ = ("__array_interface__", "hold", "memory")

    def __init__(self, memory: npt.NDArray[np.uint8], hold: _Hold) -> None:
        self.__array_interface__ = memory.__array_interface__
        self.memory, self.hold = memory, hold


def check_range(name: str, offset: int, size: int, total: int) -> None:
    """Raise CorruptCheckpointError if a range exceeds `total` bytes."""
    if offset + size > total:
        raise CorruptCheckpointError(
            f"the object ends at byte {total}, but {offset + size} bytes are needed: it is truncated",
            file=name,
            offset=offset,
        )
