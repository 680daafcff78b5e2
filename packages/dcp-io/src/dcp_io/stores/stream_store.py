"""`StreamStore`: a store over any file system that implements stock's stream interface (`FileSystemBase`).

Source: torch 2.13 `torch.distributed.checkpoint.filesystem.FileSystemBase` (methods called, and how).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dcp_base.errors import DcpError
from dcp_io.errors import StorageError
from dcp_io.stores.local_store import sync_folder
from dcp_io.stores.store import TEMPORARY_SUFFIX, Entry, Sink, Source, Store, check_name
from dcp_io.stores.stream_files import StreamFileSystem, StreamSink, StreamSource, read_all
from dcp_manifest.errors import CheckpointNotFoundError
from dcp_manifest.folders.folder import METADATA_NAME, RankIndexName
from dcp_manifest.types import Buffer


class StreamStore(Store):
    """Store in a folder of a file system with stock's stream interface, which cannot list a folder.

    So the store finds only files that it wrote itself or that an index names, does not notice a concurrent save, and
    leaves the leftovers of a killed save. If the file system's rename does not replace an existing file, a crash during
    `publish` may leave no file. `sync` fsyncs streams with a file descriptor, and a folder with a `Path`.

    Methods of `fs` are called from several threads, as by stock. `path` is the folder, in the form that `fs` uses.
    """

    read_gap_bytes = -1  # a stream may know only the ranges of items: no read spans two
    read_step_bytes = 2 << 20

    def __init__(self, fs: StreamFileSystem, path: Any) -> None:
        self._fs = fs
        self._path = path
        self._made: set[str] = set()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Path of the folder."""
        return os.fspath(self._path) if isinstance(self._path, str | os.PathLike) else str(self._path)

    def make(self) -> None:
        """Make the folder, if there are folders."""
        self._fs.mkdir(self._path)

    def create(self, name: str, *, sync: bool = True) -> Sink:
        """Create a file."""
        place = self._inside(name)
        if self._fs.exists(place):
            raise FileExistsError(f"{self.url}/{name} exists already")
        self._make_parent(name)
        sink = StreamSink(self._fs, name, place, sync=sync)
        self._note(name)
        return sink

    def publish(self, name: str, data: Buffer, *, tag: str = "", sync: bool = True) -> None:
        """Rename a temporary file, and check that it replaced the file."""
        content, place = bytes(data), self._inside(name)
        folder, slash, base = name.rpartition("/")
        temporary = f"{folder}{slash}.{base}.{tag}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
        self._make_parent(name)
        with StreamSink(self._fs, temporary, self._inside(temporary), sync=sync) as sink:
            sink.write([content])
            sink.close()
            self._replace(self._inside(temporary), place, content)
        self._note(name)
        if sync:
            self.sync_folder()

    def _replace(self, temporary: Any, place: Any, content: bytes) -> None:
        old = self._content(place)
        try:
            self._fs.rename(temporary, place)
        except Exception:
            if old is None or not self._fs.exists(temporary):
                raise
        if self._content(place) == content:
            return
        if old is not None and self._fs.exists(temporary):  # this rename does not replace: remove first, like stock
            self._fs.rm_file(place)
            self._fs.rename(temporary, place)
        if self._content(place) != content:
            raise StorageError(f"{type(self._fs).__qualname__}.rename did not bring {temporary} to {place}")

    def _content(self, place: Any) -> bytes | None:
        return read_all(self._fs, place) if self._fs.exists(place) else None

    def touch(self, name: str) -> None:
        """Check that the file exists; its time cannot be set."""
        if not self.exists(name):
            raise self._missing(name)

    def read(self, name: str) -> bytes:
        """Read the whole file."""
        with self._finding(name):
            return read_all(self._fs, self._inside(name))

    def open(self, name: str) -> Source:
        """Open a stream; its reads run in sequence."""
        with self._finding(name):
            return StreamSource(self._fs, name, self._inside(name))

    def size(self, name: str) -> int:
        """Return the size."""
        with contextlib.closing(self.open(name)) as source:
            return source.size()

    def exists(self, name: str) -> bool:
        """Whether the file exists."""
        return bool(self._fs.exists(self._inside(name)))

    def list(self) -> list[Entry]:
        """List files of this store object, and indexes."""
        with self._lock:
            names = {name for name in self._made if "/" not in name}
        if self.exists(METADATA_NAME):
            names.add(METADATA_NAME)
        else:
            names.update(self._rank_indexes())
        now = time.time()  # the true time is unknown; it is only known to be past
        return [Entry(name, self.size(name), now) for name in sorted(names) if self.exists(name)]

    def _rank_indexes(self) -> Iterator[str]:
        rank = 0
        while self.exists(name := str(RankIndexName(rank, None))):
            yield name
            rank += 1

    def delete(self, name: str) -> None:
        """Remove the file."""
        if self.exists(name):
            self._fs.rm_file(self._inside(name))
        with self._lock:
            self._made.discard(name)

    def sync_folder(self) -> None:
        """Fsync a local folder (a `Path`)."""
        if isinstance(self._path, Path):
            with contextlib.suppress(OSError):
                sync_folder(str(self._path))

    def _inside(self, name: str) -> Any:
        return self._fs.concat_path(self._path, check_name(name))

    def _make_parent(self, name: str) -> None:
        if "/" in name:
            self._fs.mkdir(self._inside(name.rpartition("/")[0]))

    def _note(self, name: str) -> None:
        with self._lock:
            self._made.add(name)

    @contextlib.contextmanager
    def _finding(self, name: str) -> Iterator[None]:
        try:
            yield
        except DcpError:
            raise
        except Exception as error:
            if self.exists(name):
                raise
            raise self._missing(name) from error

    def _missing(self, name: str) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(f"{self.url}/{name} is missing; the checkpoint is incomplete or was removed")
