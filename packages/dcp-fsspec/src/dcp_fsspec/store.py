"""`FsspecStore`: a folder of any fsspec file system as a `dcp_io.Store`.

Fsspec documents few guarantees of its file systems; `kinds` lists the assumed capabilities of each file system.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from dcp_fsspec.kinds import Kind, is_local, kind_of, supports_conditions, takes_exclusive_mode
from dcp_fsspec.renaming import replace_file
from dcp_fsspec.requests import repeated
from dcp_fsspec.sink import FsspecSink
from dcp_fsspec.times import modified_seconds
from dcp_io import TEMPORARY_SUFFIX, Entry, Place, Sink, Store, TruncatedError, check_name
from dcp_manifest import without_end_slash
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError

__all__ = ["FsspecStore"]

BLOCK_BYTES = 8 << 20
# What is in this process has no server that would order its changes.
_process_lock = threading.RLock()


class FsspecStore(Store):
    """Store in a folder of an fsspec file system.

    Guarantees: those of `Store`, with the durability of the file system. On file systems with conditional writes (S3,
    memory, local), `create` never replaces a file, and `touch` never restores a removed file. On other file systems
    both methods first check whether the file exists, which is not atomic.

    Args:
        fs: The fsspec file system, made with `use_listings_cache=False`.
        path: Path of the folder in the file system.
        url: URI of the folder, for messages and as a checkpoint id.
        block_bytes: Size of the parts of an upload, bytes.

    Example:
        ```python
        import fsspec
        from dcp_fsspec import FsspecStore

        fs = fsspec.filesystem("memory", use_listings_cache=False)
        store = FsspecStore(fs, "/run", "memory://run")
        store.publish("current", b"version 2")
        assert store.read("current") == b"version 2"
        ```
    """

    read_gap_bytes: int | None = 64 << 10
    read_step_bytes: int | None = 8 << 20

    def __init__(self, fs: Any, path: str, url: str, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._fs = fs
        self._path = path.rstrip("/")
        self._url = without_end_slash(url)
        self._block_bytes = block_bytes
        self._kind: Kind = kind_of(fs)

    @property
    def url(self) -> str:
        """URI of the folder."""
        return self._url

    @property
    def place(self) -> Place:
        """`local` for files of this machine and for fsspec's file system in memory, otherwise `remote`."""
        return "local" if is_local(self._fs) or self._kind == "process" else "remote"

    def make(self) -> None:
        """Make the folder, if the file system has folders."""
        if self._kind != "objects":
            with self._changing():
                repeated(f"mkdir {self.url}", lambda: self._fs.makedirs(self._path, exist_ok=True))

    def child(self, name: str) -> FsspecStore:
        """Return the store of a subfolder."""
        path, url = self._inside(name), f"{self._url}/{name}"
        return FsspecStore(self._fs, path, url, block_bytes=self._block_bytes)

    def create(self, name: str) -> Sink:
        """Create a file for writing; folders within the name are made."""
        path = self._inside(name)
        with self._changing():
            if self.exists(name):
                raise FileExistsError(f"{self.url}/{name} exists already")
            self._make_parent(name, path)
            exclusive = takes_exclusive_mode(self._fs)
            return FsspecSink(self._fs, name, path, exclusive=exclusive, block_bytes=self._block_bytes)

    def publish(self, name: str, data: bytes | bytearray | memoryview, *, tag: str = "", sync: bool = True) -> None:
        """Replace the file: by one PUT or, if the file system shows incomplete files, by renaming a temporary file.

        Arguments: see `Store.publish`; `sync` has no effect, and the service determines the durability.
        """
        del sync
        path, content = self._inside(name), bytes(data)
        with self._changing():
            self._make_parent(name, path)
            if self._kind != "files":
                repeated(f"PUT {self.url}/{name}", lambda: self._fs.pipe_file(path, content))
                return
            folder, _, base = path.rpartition("/")
            temporary = f"{folder}/.{base}.{tag}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
            try:
                repeated(f"write {temporary}", lambda: self._fs.pipe_file(temporary, content))
                replace_file(self._fs, temporary, path, content, f"{self.url}/{name}")
            except BaseException:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(temporary)
                raise

    def touch(self, name: str) -> None:
        """Set the file's modification time to now, if necessary by writing the same bytes again."""
        path = self._inside(name)
        with self._changing():
            if is_local(self._fs):
                with self._finding(name):
                    os.utime(path)
                return
            info, data = self._info(name), self.read(name)
            conditions = {"IfMatch": info["ETag"]} if supports_conditions(self._fs) and "ETag" in info else {}
            try:
                if self._kind == "files":
                    self.publish(name, data)
                else:
                    self._fs.pipe_file(path, data, **conditions)
            except Exception as error:
                if not self.exists(name):
                    raise self._missing(name) from error
                if not conditions:
                    raise
                # A process that changed it meanwhile has renewed its time.

    def read(self, name: str) -> bytes:
        """Read the whole file."""
        path = self._inside(name)
        with self._finding(name):
            self._refresh(path)
            return bytes(repeated(f"GET {self.url}/{name}", lambda: self._fs.cat_file(path)))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the file's bytes from `offset` on, by one ranged read."""
        path, wanted = self._inside(name), len(buffer)
        if not wanted:
            self.size(name)
            return

        def get() -> bytes:
            try:
                found: bytes = self._fs.cat_file(path, start=offset, end=offset + wanted)
            except FileNotFoundError:
                raise
            except Exception:
                self._check_reaches(name, offset + wanted, offset)
                raise
            if len(found) != wanted:
                self._check_reaches(name, offset + wanted, offset)
                raise TruncatedError(f"{len(found)} of {wanted} bytes arrived")
            return found

        with self._finding(name):
            buffer[:] = repeated(f"GET {self.url}/{name}", get)

    def _check_reaches(self, name: str, stop: int, offset: int) -> None:
        if self.size(name) < stop:
            raise CorruptCheckpointError(
                f"the file ends before byte {stop}, which is needed: it is truncated", file=name, offset=offset
            )

    def size(self, name: str) -> int:
        """Return the file's size in bytes."""
        return int(self._info(name)["size"])

    def exists(self, name: str) -> bool:
        """Whether the file exists."""
        try:
            self._info(name)
        except CheckpointNotFoundError:
            return False
        return True

    def list(self) -> list[Entry]:
        """List the files directly in the folder."""
        found = ((self._name(info), info) for info in self._ls() if info["type"] != "directory")
        # The time is unknown, only that it is past: a file without one must not look like a dead save's.
        now = time.time()
        return [
            Entry(name, int(info["size"] or 0), modified_seconds(info, self._fs, otherwise=now))
            for name, info in found
            if name
        ]

    def folders(self) -> tuple[str, ...]:
        """Return the names of the direct subfolders."""
        found = (self._name(info) for info in self._ls() if info["type"] == "directory")
        return tuple(sorted(name for name in found if name))

    def delete(self, name: str) -> None:
        """Remove the file."""
        path = self._inside(name)
        with self._changing(), contextlib.suppress(FileNotFoundError):
            repeated(f"DELETE {self.url}/{name}", lambda: self._fs.rm_file(path))

    def remove_folder(self) -> None:
        """Remove the folder if it is empty and the file system has folders."""
        if self._kind == "objects" or self._ls():
            return
        with self._changing(), contextlib.suppress(OSError):
            self._fs.rmdir(self._path)

    def sync_folder(self) -> None:
        """Do nothing: fsspec has no call that makes acknowledged writes more durable."""

    def _inside(self, name: str) -> str:
        return f"{self._path}/{check_name(name)}"

    def _make_parent(self, name: str, path: str) -> None:
        if "/" in name and self._kind == "files":
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _info(self, name: str) -> dict[str, Any]:
        path = self._inside(name)
        with self._finding(name):
            self._refresh(path)
            info: dict[str, Any] = repeated(f"HEAD {self.url}/{name}", lambda: self._fs.info(path))
        if info["type"] == "directory":
            raise self._missing(name)
        return info

    def _ls(self) -> Sequence[dict[str, Any]]:
        self._refresh(self._path)
        try:
            found = repeated(f"list {self.url}", lambda: self._fs.ls(self._path, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [info for info in found if info["name"].rstrip("/") != self._path]

    def _name(self, info: dict[str, Any]) -> str:
        return str(info["name"]).rstrip("/").rpartition("/")[2]

    def _refresh(self, path: str) -> None:
        """Drop the file system's listing cache: other ranks change the same folder."""
        self._fs.invalidate_cache(path)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        if self._kind == "process":
            with _process_lock:
                yield
        else:
            yield

    @contextlib.contextmanager
    def _finding(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            if isinstance(error, CheckpointNotFoundError):
                raise
            raise self._missing(name) from error

    def _missing(self, name: str) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(f"{self.url}/{name} is missing; the checkpoint is incomplete or was removed")
