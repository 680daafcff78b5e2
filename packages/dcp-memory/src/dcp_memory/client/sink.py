"""`KeeperSink`: a new object in a keeper. Bytes in lent memory are referred to, all others are copied."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcp_io import FileId, Sink, find_mapping
from dcp_memory.client.keepers import Connection
from dcp_memory.client.link import Answer, NoKeeperError
from dcp_memory.client.mapped import MemoryFile
from dcp_memory.errors import KeeperLostError
from dcp_memory.wire import PAGE_BYTES

__all__ = ["SMALL_BYTES", "KeeperSink", "Writing"]

Buffer = bytes | bytearray | memoryview

SMALL_BYTES = 256 << 10
"""Limit of an object that lies in the keeper's own memory, and of what is collected before it is written."""
_FIRST_BYTES = 64 << 10
_MOST_BYTES = 64 << 20
_REFERRED_BYTES = 4096
_WAIT_SECONDS = 0.0005
_LONGEST_WAIT_SECONDS = 0.02


class Writing:
    """An object that is being written to a keeper: its extents, and memory for what is copied.

    Args:
        connection: Connection to the keeper.
        options: Options of the keeper if it has to be started.
        key: Key that it reserves; None to replace an object at the end.
        name: Name of the object, for messages.

    Raises:
        FileExistsError: The key is taken.
    """

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
        """Append buffers: large ones that lie in lent memory by reference."""
        for buffer in buffers:
            size = len(buffer)
            found = find_mapping(buffer) if size >= _REFERRED_BYTES else None
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
        """Complete the object, under the reserved key or, replacing what is there, under the given one."""
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
        """Free the memory and the key; no error if the keeper has gone."""
        self._file = None
        with contextlib.suppress(OSError, NoKeeperError):
            self._ask({"do": "drop", "id": self._id})

    def _is_lent(self, file: FileId) -> bool:
        """Return whether a memory file is one that the keeper has lent; it then stays with the object."""
        known = self._known.get(file)
        if known is None:
            answer = self._ask({"do": "refer", "id": self._id, "device": file.device, "inode": file.inode})
            known = self._known[file] = bool(answer.fields["refers"])
        return known

    def _add(self, inode: int, offset: int, size: int) -> None:
        """Add an extent, or make the last one longer."""
        extents = self._extents
        if extents and extents[-3] == inode and extents[-2] + extents[-1] == offset:
            extents[-1] += size
        else:
            extents.extend((inode, offset, size))

    def _place_first(self) -> None:
        """Give the bytes of an object that turns out not to be small their place."""
        if not self._extents and self._collected:
            collected, self._collected = self._collected, bytearray()
            self._place(collected)

    def _place(self, buffer: Buffer) -> None:
        """Give a small buffer its place; many of them are written at once."""
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
        """Write the small buffers that have a place."""
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
        """Copy a buffer into memory of the keeper, by writing to the file: pages that exist cost no faults."""
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
        """Get more memory from the keeper."""
        nbytes = min(max(self._grow_bytes, min(wanted, _MOST_BYTES)), _MOST_BYTES)
        self._grow_bytes = min(2 * self._grow_bytes, _MOST_BYTES)
        pause = _WAIT_SECONDS
        while (answer := self._ask({"do": "extend", "id": self._id, "nbytes": nbytes})).fields.get("wait"):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_SECONDS)
        inode = answer.fields["segment"]
        if self._file is None or self._file.inode != inode:
            self._file = self._connection.segments.get(inode, self._epoch)
        self._at = answer.fields["offset"]
        self._stop = self._at + answer.fields["nbytes"]

    def _ask(self, fields: Mapping[str, Any], payload: bytes | bytearray | memoryview = b"") -> Answer:
        try:
            return self._link.ask(fields, memoryview(payload), epoch=self._epoch)
        except NoKeeperError:
            raise KeeperLostError(f"{self.name}: the keeper has ended") from None


class KeeperSink(Sink):
    """A new object.

    Args:
        name: Name of the object in its store.
        writing: What is being written.
        remove: Function that removes the complete object.
    """

    refers = True

    def __init__(self, name: str, writing: Writing, remove: Callable[[], object]) -> None:
        self._name = name
        self._writing: Writing | None = writing
        self._size = 0
        self._remove: Callable[[], object] | None = remove

    @property
    def name(self) -> str:
        """Name of the object."""
        return self._name

    def tell(self) -> int:
        """Return the bytes written so far."""
        return self._size if self._writing is None else self._writing.size

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append the buffers."""
        self._open().write(buffers)

    def close(self, *, sync: bool) -> None:
        """Complete the object; memory has no way to be durable."""
        del sync
        writing = self._writing
        if writing is not None:
            writing.commit()
            self._size, self._writing = writing.size, None

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
