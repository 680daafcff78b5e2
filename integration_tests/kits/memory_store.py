"""`MemoryStore`: a store in this process's memory, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

from dcp_io.stores.store import Entry, RequestSource, Sink, Source, SupportsFolders, check_name
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_manifest.types import Buffer

__all__ = ["OBJECTS", "MemoryStore"]

OBJECTS: dict[str, bytes] = {}

_lock = threading.Lock()  # for changes: `touch` reads and writes


class _Object(bytes):
    mtime: float


def _object(data: Buffer) -> _Object:
    made = _Object(data)
    made.mtime = time.time()
    return made


class _MemorySink(Sink):
    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._path = path
        self._data = bytearray()
        self._ended = False

    @property
    def name(self) -> str:
        return self._name

    def write(self, buffers: Sequence[Buffer]) -> None:
        if self._ended:
            raise ValueError(f"{self._name} has been closed")
        for buffer in buffers:
            self._data += buffer

    def close(self) -> None:
        if not self._ended:
            OBJECTS[self._path] = _object(self._data)
            self._ended = True

    def abort(self) -> None:
        OBJECTS.pop(self._path, None)
        self._ended = True


class MemoryStore(SupportsFolders):
    """A store in this process's memory, shared by equal `folder`s."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @property
    def url(self) -> str:
        return f"memory:{self._folder}"

    def _path(self, name: str) -> str:
        return f"{self._folder}/{check_name(name)}"

    def make(self) -> None:
        pass

    def create(self, name: str, *, sync: bool = True) -> Sink:
        del sync
        path = self._path(name)
        with _lock:
            if path in OBJECTS:
                raise FileExistsError(f"{self.url}/{name} exists")
            OBJECTS[path] = _object(b"")
        return _MemorySink(name, path)

    def publish(self, name: str, data: Buffer, *, tag: str = "", sync: bool = True) -> None:
        del tag, sync
        path = self._path(name)
        with _lock:
            OBJECTS[path] = _object(data)

    def touch(self, name: str) -> None:
        path = self._path(name)
        with _lock:
            OBJECTS[path] = _object(self.read(name))

    def read(self, name: str) -> bytes:
        try:
            return OBJECTS[self._path(name)]
        except KeyError:
            raise CheckpointNotFoundError(f"{self.url}/{name} is missing") from None

    def open(self, name: str) -> Source:
        check_name(name)
        return RequestSource(partial(self.size, name), partial(self._read_range, name))

    def _read_range(self, name: str, offset: int, buffer: memoryview) -> None:
        part = memoryview(self.read(name))[offset : offset + len(buffer)]
        if len(part) < len(buffer):
            raise CorruptCheckpointError(f"{self.url}/{name} ends early", file=name, offset=offset)
        buffer[:] = part

    def size(self, name: str) -> int:
        return len(self.read(name))

    def exists(self, name: str) -> bool:
        return self._path(name) in OBJECTS

    def _below(self) -> dict[str, bytes]:
        start = f"{self._folder}/"
        return {path[len(start) :]: data for path, data in list(OBJECTS.items()) if path.startswith(start)}

    def list(self) -> list[Entry]:
        return [
            Entry(name, len(data), getattr(data, "mtime", 0.0))
            for name, data in self._below().items()
            if "/" not in name
        ]

    def delete(self, name: str) -> None:
        path = self._path(name)
        with _lock:
            OBJECTS.pop(path, None)

    def sync_folder(self) -> None:
        pass

    def child(self, name: str) -> MemoryStore:
        return MemoryStore(self._path(name))

    def folders(self) -> tuple[str, ...]:
        return tuple(sorted({name.partition("/")[0] for name in self._below() if "/" in name}))
