"""A store of files in virtual time, which remembers what would survive a crash of its machine.

Bytes of a file are durable once it was closed with `sync`, and names once their folder was synced. A crash keeps any
part of what is not durable, as the seed chooses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from dcp_core.testing.rehearsal.clock import Clock, Resource
from dcp_io.stores.store import Entry, Place, RequestSource, Sink, Source, SupportsFolders, check_name
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_manifest.types import Buffer

__all__ = ["Disk", "VirtualSink", "VirtualStore"]


@dataclass(eq=False, slots=True)
class _File:
    mtime: float
    data: bytes | bytearray = field(default_factory=bytearray)
    durable: int = 0
    skipped: int = 0
    """Bytes after `data` that are counted, but not kept: they are read as zeros."""

    @property
    def size(self) -> int:
        return len(self.data) + self.skipped


@dataclass(slots=True)
class Disk:
    """A file system that all hosts share: each host has a rate of its own, all together have `bytes_per_second`."""

    clock: Clock
    host_of: Callable[[int], int] = lambda rank: 0  # noqa: ARG005
    seconds: float = 0.0
    """Latency of each operation."""
    host_bytes_per_second: float = 1e30
    bytes_per_second: float = 1e30
    files: dict[str, _File] = field(default_factory=dict)
    durable: dict[str, _File] = field(default_factory=dict)
    hosts: dict[int, Resource] = field(default_factory=dict)
    whole: Resource = field(default_factory=Resource)
    operations: int = 0
    at_operation: dict[int, Callable[[], None]] = field(default_factory=dict)
    """Number of an operation → function that is called before it, such as a kill."""
    fails: Callable[[str, str], bool] = lambda operation, path: False  # noqa: ARG005
    """Whether an operation on a path fails."""
    written_bytes: Counter[int] = field(default_factory=Counter)
    file_counts: Counter[int] = field(default_factory=Counter)

    def wait(self, operation: str, path: str, size: int = 0) -> int:
        """Take an operation's time; return the calling rank's host. Raises OSError if the operation fails."""
        task = self.clock.task
        host = 0 if task is None else self.host_of(task.number)
        self.clock.wait_until(self.begin(host, size))
        if self.fails(operation, path):
            raise OSError(5, f"{operation} {path}: the disk failed")
        return host

    def begin(self, host: int, size: int = 0) -> float:
        """Begin an operation; return when it ends."""
        self.operations += 1
        if (fault := self.at_operation.pop(self.operations, None)) is not None:
            fault()
        end = now = self.clock.now
        if size:  # other requests do not queue behind data
            end = self.hosts.setdefault(host, Resource()).take(now, size / self.host_bytes_per_second)
            end = max(end, self.whole.take(now, size / self.bytes_per_second))
        return end + self.seconds

    def crash(self) -> None:
        """Lose what is not durable, in part."""
        draw, left = self.clock.random, {}
        for path in sorted({*self.files, *self.durable}):
            file = draw.choice((self.files.get(path), self.durable.get(path)))
            if file is not None:
                size = draw.randint(file.durable, len(file.data)) if len(file.data) > file.durable else len(file.data)
                left[path] = _File(file.mtime, file.data[:size], size)
        self.files, self.durable = left, dict(left)


class VirtualSink(Sink):
    """File that is being written."""

    name = ""

    def __init__(self, disk: Disk, name: str, path: str, file: _File, *, sync: bool) -> None:
        self._disk, self.name, self._path, self._file, self._sync = disk, name, path, file, sync
        self._ended = False

    def write(self, buffers: Sequence[Buffer]) -> None:
        if self._ended:
            raise ValueError(f"{self.name} has been closed")
        data = b"".join(buffers)
        self._disk.written_bytes[self._disk.wait("write", self._path, len(data))] += len(data)
        self._file.data += data

    def close(self) -> None:
        if not self._ended:
            self._disk.wait("close", self._path)
            self._file.durable = len(self._file.data) if self._sync else self._file.durable
            self._ended = True

    def abort(self) -> None:
        self._disk.wait("abort", self._path)
        self._disk.files.pop(self._path, None)
        self._ended = True


class VirtualStore(SupportsFolders):
    """Folder of a `Disk`."""

    place: Place = "local"
    url = ""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk, self._folder, self.url = disk, folder, f"rehearsal:{folder}"

    def _path(self, name: str) -> str:
        return f"{self._folder}/{check_name(name)}"

    def make(self) -> None:
        self._disk.wait("make", self._folder)

    def create(self, name: str, *, sync: bool = True) -> VirtualSink:
        path = self._path(name)
        host = self._disk.wait("create", path)
        if path in self._disk.files:
            raise FileExistsError(f"{self.url}/{name} exists")
        self._disk.file_counts[host] += 1
        file = self._disk.files[path] = _File(self._disk.clock.now)
        return VirtualSink(self._disk, name, path, file, sync=sync)

    def write_sizes(self, host: int, sizes: Mapping[str, int], pieces: int, begin: bytes) -> Iterator[float]:
        """Write files in turns, in pieces, for `Clock.play`. Only their first bytes are kept."""
        disk = self._disk
        for name, size in sizes.items():
            yield disk.begin(host)
            disk.file_counts[host] += 1
            disk.files[self._path(name)] = _File(disk.clock.now, begin, len(begin), size - len(begin))
        for piece in range(pieces):
            for size in sizes.values():
                nbytes = size * (piece + 1) // pieces - size * piece // pieces
                yield disk.begin(host, nbytes)
                disk.written_bytes[host] += nbytes
        for _ in sizes:
            yield disk.begin(host)  # closed

    def publish(self, name: str, data: Buffer, *, tag: str = "", sync: bool = True) -> None:
        """Replace the object in one step; without `sync`, a crash may keep the name with a part of the bytes."""
        del tag
        path, disk = self._path(name), self._disk
        disk.written_bytes[disk.wait("publish", path, len(data))] += len(data)
        file = _File(disk.clock.now, bytes(data), len(data) if sync else 0)
        disk.files[path] = file
        if sync:
            disk.wait("sync", path)
            disk.durable[path] = file

    def touch(self, name: str) -> None:
        self._find(name, "touch").mtime = self._disk.clock.now

    def _find(self, name: str, operation: str, size: int = 0) -> _File:
        path = self._path(name)
        self._disk.wait(operation, path, size)
        if path not in self._disk.files:
            raise CheckpointNotFoundError(f"{self.url}/{name} is missing")
        return self._disk.files[path]

    def read(self, name: str) -> bytes:
        file = self._disk.files.get(self._path(name))
        return bytes(self._find(name, "read", 0 if file is None else len(file.data)).data)

    def open(self, name: str) -> Source:
        check_name(name)
        return RequestSource(partial(self.size, name), partial(self._read_range, name))

    def _read_range(self, name: str, offset: int, buffer: memoryview) -> None:
        file = self._find(name, "read", len(buffer))
        if offset + len(buffer) > file.size:
            raise CorruptCheckpointError(f"{self.url}/{name} ends early", file=name, offset=offset)
        kept = bytes(file.data[offset : offset + len(buffer)])
        buffer[:] = kept + bytes(len(buffer) - len(kept))

    def size(self, name: str) -> int:
        return self._find(name, "size").size

    def exists(self, name: str) -> bool:
        self._disk.wait("exists", self._path(name))
        return self._path(name) in self._disk.files

    def _below(self) -> dict[str, _File]:
        start = f"{self._folder}/"
        return {path[len(start) :]: file for path, file in self._disk.files.items() if path.startswith(start)}

    def list(self) -> list[Entry]:
        self._disk.wait("list", self._folder)
        return [Entry(name, file.size, file.mtime) for name, file in sorted(self._below().items()) if "/" not in name]

    def delete(self, name: str) -> None:
        path = self._path(name)
        self._disk.wait("delete", path)
        self._disk.files.pop(path, None)

    def sync_folder(self) -> None:
        self._disk.wait("sync", self._folder)
        start, disk = f"{self._folder}/", self._disk
        kept = {path: file for path, file in disk.durable.items() if not path.startswith(start)}
        disk.durable = kept | {path: file for path, file in disk.files.items() if path.startswith(start)}

    def child(self, name: str) -> VirtualStore:
        return VirtualStore(self._disk, self._path(name))

    def folders(self) -> tuple[str, ...]:
        return tuple(sorted({name.partition("/")[0] for name in self._below() if "/" in name}))
