"""Measured writes: a save's files by name and size, without a byte of them written.

The files are laid out by the code that writes them, so that the sizes are exact; only the bytes of large payloads are
passed over, neither read nor checksummed.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from dcp_io.requests import PiecewiseData
from dcp_io.stores.store import Buffer, Entry, Sink, Store, check_name
from dcp_io.writing.data_file import DataFile
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_manifest.index.items import border_count

__all__ = ["MeasuredFile", "MeasuringStore"]


@dataclass(slots=True)
class _Object:
    size: int
    data: bytes | None
    """Contents of what was published; None for data files."""
    mtime: float


class MeasuringStore(Store):
    """A folder that keeps the sizes of its files, and the contents of markers and indexes only.

    Args:
        url: Name of the folder that it stands for, for messages.
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url} (measured {secrets.token_hex(4)})"  # a save here is none of the folder itself
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}

    @property
    def url(self) -> str:
        """Name of the folder that it stands for, and a mark."""
        return self._url

    def make(self) -> None:
        """Do nothing: there is no folder."""

    def create(self, name: str) -> Sink:
        """Return a sink that counts."""
        with self._lock:
            if name in self._objects:
                raise FileExistsError(f"{self.url}/{name} exists")
            self._objects[check_name(name)] = _Object(0, None, time.time())
        return _MeasuringSink(name, self._objects)

    def publish(self, name: str, data: Buffer, *, tag: str = "", sync: bool = True) -> None:
        """Keep an object."""
        del tag, sync
        with self._lock:
            self._objects[check_name(name)] = _Object(len(data), bytes(data), time.time())

    def touch(self, name: str) -> None:
        """Set the modification time of an object."""
        self._object(name).mtime = time.time()

    def read(self, name: str) -> bytes:
        """Return the contents of a published object."""
        return self._object(name).data or b""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from a published object; raises CorruptCheckpointError for data files."""
        part = self.read(name)[offset : offset + len(buffer)]
        if len(part) < len(buffer):
            raise CorruptCheckpointError("the file is only measured", file=name, offset=offset)
        buffer[:] = part

    def size(self, name: str) -> int:
        """Return the size of an object."""
        return self._object(name).size

    def exists(self, name: str) -> bool:
        """Whether there is that object."""
        return name in self._objects

    def list(self) -> list[Entry]:
        """List the objects; those in subfolders too, which a save does not make."""
        with self._lock:
            return [Entry(name, each.size, each.mtime) for name, each in self._objects.items()]

    def delete(self, name: str) -> None:
        """Remove an object."""
        with self._lock:
            self._objects.pop(name, None)

    def sync_folder(self) -> None:
        """Do nothing: nothing here is durable."""

    def _object(self, name: str) -> _Object:
        try:
            return self._objects[name]
        except KeyError:
            raise CheckpointNotFoundError(f"{self.url}/{name} is missing") from None


class _MeasuringSink(Sink):
    def __init__(self, name: str, objects: dict[str, _Object]) -> None:
        self._name = name
        self._objects = objects

    @property
    def name(self) -> str:
        return self._name

    def tell(self) -> int:
        return self._objects[self._name].size

    def write(self, buffers: Sequence[Buffer]) -> None:
        self.skip(sum(map(len, buffers)))

    def skip(self, count: int) -> None:
        """Count bytes that nobody has looked at."""
        self._objects[self._name].size += count

    def close(self, *, sync: bool) -> None:
        del sync

    def abort(self) -> None:
        self._objects.pop(self._name, None)


class MeasuredFile(DataFile):
    """A data file in a `MeasuringStore`: as `DataFile`, without a look at the bytes of large payloads."""

    def _stream(self, data: Buffer | PiecewiseData, size: int, *, counted: bool) -> int:
        del data, counted
        self._flush()
        self._position += size
        self._written = self._position
        cast("_MeasuringSink", self._sink).skip(size)
        if borders := border_count(size):
            self.running_crcs.append(np.zeros(borders, np.uint32))
        return 0
