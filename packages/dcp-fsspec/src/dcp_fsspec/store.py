"""`FsspecStore`: a folder of any fsspec file system as a `dcp_io.Store`.

Fsspec documents few guarantees; `kinds` lists the assumed capabilities. A replacement by a rename is checked: some
file systems report a failed rename only by a return value, which their fsspec package ignores.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from dcp_base.errors import DcpError
from dcp_base.schemes import without_end_slash
from dcp_fsspec.kinds import Kind, is_local, kind_of, renames_by_options, supports_conditions, takes_exclusive_mode
from dcp_io import Entry, Place, RequestSource, Sink, Source, StorageError, SupportsFolders, check_name
from dcp_io.stores.store import TEMPORARY_SUFFIX
from dcp_io.stores.stream_files import Attempts, UploadSink
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError

BLOCK_BYTES = 8 << 20
# What is in this process has no server that would order its changes.
_process_lock = threading.RLock()


class FsspecStore(SupportsFolders):
    """Store in a folder of an fsspec file system.

    Guarantees: those of `Store`, with the durability of the file system. On file systems with conditional writes (S3,
    memory, local), `create` never replaces a file, and `touch` never restores a removed file. On other file systems
    both methods first check whether the file exists, which is not atomic.
    """

    read_gap_bytes = 64 << 10
    read_step_bytes = 8 << 20

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
        """`local` for files of this machine and fsspec's file system in memory, otherwise `remote`."""
        return "local" if is_local(self._fs) or self._kind == "process" else "remote"

    def make(self) -> None:
        """Make the folder, if the file system has folders."""
        if self._kind != "objects":
            with self._changing():
                _repeated(f"mkdir {self.url}", lambda: self._fs.makedirs(self._path, exist_ok=True))

    def child(self, name: str) -> FsspecStore:
        """Return the store of a subfolder."""
        path, url = self._inside(name), f"{self._url}/{name}"
        return FsspecStore(self._fs, path, url, block_bytes=self._block_bytes)

    def create(self, name: str, *, sync: bool = True) -> Sink:
        """Create a file; folders within the name are made."""
        del sync
        path = self._inside(name)
        with self._changing():
            if self.exists(name):
                raise FileExistsError(f"{self.url}/{name} exists already")
            self._make_parent(name, path)
            exclusive = takes_exclusive_mode(self._fs)
            return _FsspecSink(self._fs, name, path, exclusive=exclusive, block_bytes=self._block_bytes)

    def publish(self, name: str, data: bytes | bytearray | memoryview, *, tag: str = "", sync: bool = True) -> None:
        """Replace the file: by one PUT or, if the file system shows incomplete files, by renaming a temporary file.

        `sync` is ignored: the service determines the durability.
        """
        del sync
        path, content = self._inside(name), bytes(data)
        with self._changing():
            self._make_parent(name, path)
            if self._kind != "files":
                _repeated(f"PUT {self.url}/{name}", lambda: self._fs.pipe_file(path, content))
                return
            folder, _, base = path.rpartition("/")
            temporary = f"{folder}/.{base}.{tag}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
            try:
                _repeated(f"write {temporary}", lambda: self._fs.pipe_file(temporary, content))
                _replace_file(self._fs, temporary, path, content, f"{self.url}/{name}")
            except BaseException:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(temporary)
                raise

    def touch(self, name: str) -> None:
        """Set the modification time to now, if necessary by writing the same bytes again."""
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
            return bytes(_repeated(f"GET {self.url}/{name}", lambda: self._fs.cat_file(path)))

    def open(self, name: str) -> Source:
        """Open the file; each read is a request."""
        check_name(name)
        return RequestSource(partial(self.size, name), partial(self._read_range, name))

    def _read_range(self, name: str, offset: int, buffer: memoryview) -> None:
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
                raise ConnectionError(f"{len(found)} of {wanted} bytes arrived")
            return found

        with self._finding(name):
            buffer[:] = _repeated(f"GET {self.url}/{name}", get)

    def _check_reaches(self, name: str, stop: int, offset: int) -> None:
        if self.size(name) < stop:
            raise CorruptCheckpointError(
                f"the file ends before byte {stop}, which is needed: it is truncated", file=name, offset=offset
            )

    def size(self, name: str) -> int:
        """Return the size in bytes."""
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
        """Return the direct subfolders."""
        found = (self._name(info) for info in self._ls() if info["type"] == "directory")
        return tuple(sorted(name for name in found if name))

    def delete(self, name: str) -> None:
        """Remove the file."""
        path = self._inside(name)
        with self._changing(), contextlib.suppress(FileNotFoundError):
            _repeated(f"DELETE {self.url}/{name}", lambda: self._fs.rm_file(path))

    def remove_folder(self) -> None:
        """Remove an empty folder, if the file system has folders."""
        if self._kind == "objects" or self._ls():
            return
        with self._changing(), contextlib.suppress(OSError):
            self._fs.rmdir(self._path)

    def sync_folder(self) -> None:
        """Do nothing: fsspec lacks such a call."""

    def _inside(self, name: str) -> str:
        return f"{self._path}/{check_name(name)}"

    def _make_parent(self, name: str, path: str) -> None:
        if "/" in name and self._kind == "files":
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _info(self, name: str) -> dict[str, Any]:
        path = self._inside(name)
        with self._finding(name):
            self._refresh(path)
            info: dict[str, Any] = _repeated(f"HEAD {self.url}/{name}", lambda: self._fs.info(path))
        if info["type"] == "directory":
            raise self._missing(name)
        return info

    def _ls(self) -> Sequence[dict[str, Any]]:
        self._refresh(self._path)
        try:
            found = _repeated(f"list {self.url}", lambda: self._fs.ls(self._path, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [info for info in found if info["name"].rstrip("/") != self._path]

    def _name(self, info: dict[str, Any]) -> str:
        return str(info["name"]).rstrip("/").rpartition("/")[2]

    def _refresh(self, path: str) -> None:
        """Drop the listing cache: other ranks change the same folder."""
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


def _replace_file(fs: Any, temporary: str, path: str, content: bytes, place: str) -> None:
    """Replace `path` by renaming a temporary file, which holds `content`; complete on return."""
    _repeated(f"rename {temporary}", lambda: _rename(fs, temporary, path), attempts=1)
    if is_local(fs):  # the kernel's answer can be trusted
        return
    fs.invalidate_cache(temporary.rpartition("/")[0])
    fs.invalidate_cache(path)
    if fs.exists(temporary) or _read(fs, path) != content:
        raise StorageError(
            f"the file system did not replace {place} by what was renamed to it; nothing else was removed: save to "
            "another storage"
        )


def _rename(fs: Any, temporary: str, path: str) -> None:
    if renames_by_options(fs):
        options = {"destination": path, "renameoptions": "OVERWRITE"}
        fs._call("RENAME", method="put", path=temporary, **options)  # noqa: SLF001 - its `mv` takes no options
    else:
        fs.mv(temporary, path)


def _read(fs: Any, path: str) -> bytes | None:
    try:
        return bytes(_repeated(f"GET {path}", lambda: fs.cat_file(path)))
    except FileNotFoundError:
        return None


class _FsspecSink(UploadSink):
    def __init__(self, fs: Any, name: str, path: str, *, exclusive: bool, block_bytes: int) -> None:
        super().__init__(name, path)
        self._fs = fs
        self.may_exist = True
        mode = "xb" if exclusive else "wb"
        self._file: Any = self._once("open", lambda: fs.open(path, mode, block_size=block_bytes))

    def send(self, view: memoryview) -> None:
        self._once("write", lambda: self._file.write(view))

    def complete(self) -> None:
        try:
            self._once("close", self._file.close)
        except BaseException as error:
            mine = isinstance(error, FileExistsError) and self._is_there()
            self.give_up()
            if not mine:
                raise
            self.may_exist = True

    def _is_there(self) -> bool:
        """Return whether the file holds exactly these bytes, because an earlier attempt made it without an answer."""
        buffer = getattr(self._file, "buffer", None)
        held = buffer.getvalue() if isinstance(buffer, io.BytesIO) else None
        if held is None or len(held) != self.sent_bytes:  # parts of it were sent before: only the whole can be compared
            return False
        try:
            return bool(_repeated(f"read {self.place}", lambda: self._fs.cat_file(self.place)) == held)
        except OSError:
            return False

    def give_up(self) -> None:
        """Abort the upload, if possible: garbage collection of the file object could complete it."""
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True
        with contextlib.suppress(Exception):
            self._file.close()

    def remove(self) -> None:
        self._fs.rm_file(self.place)

    def _once(self, what: str, function: Any) -> Any:
        try:
            return _repeated(f"{what} {self.place}", function, attempts=1)
        except FileExistsError as error:
            self.may_exist = False
            raise FileExistsError(f"{self.place} exists already") from error


_NAMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
_FTP = re.compile(r"(\d{14})(\.\d+)?")


def modified_seconds(info: Mapping[str, Any], fs: Any, *, otherwise: float) -> float:
    """Return a file's modification time in seconds since the epoch; `otherwise` if the file system reports none."""
    found = _time_of(info)
    if found is None:
        with contextlib.suppress(Exception):
            found = _seconds(fs.modified(info["name"]))
    return otherwise if found is None else found


def _time_of(info: Mapping[str, Any]) -> float | None:
    if info.get("modificationTime") is not None:  # WebHDFS; its `modified` gives the hour of this machine's zone
        return float(info["modificationTime"]) / 1000
    if (of_ftp := _FTP.fullmatch(str(info.get("modify")))) is not None:  # RFC 3659: UTC
        return _seconds(dt.datetime.strptime(of_ftp[1], "%Y%m%d%H%M%S").replace(tzinfo=dt.timezone.utc))
    return _seconds(next((info[name] for name in _NAMES if info.get(name) is not None), None))


def _seconds(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = dt.datetime.fromisoformat(re.sub("[Zz]$", "+00:00", value))
        except ValueError:
            return None
    if isinstance(value, dt.datetime):
        return (value if value.tzinfo else value.replace(tzinfo=dt.timezone.utc)).timestamp()
    return None if value is None else float(value)


T = TypeVar("T")

# Implementations retry by themselves what they know to be passing; this is for what they let through.
_ATTEMPTS = 4
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, DcpError)


def _repeated(what: str, function: Callable[[], T], *, attempts: int = _ATTEMPTS) -> T:
    """Retry a request after transient errors; `attempts` is 1 if it must not be carried out twice."""
    made = Attempts(what, attempts)
    while True:
        try:
            return function()
        except _FINAL:
            raise
        except Exception as error:  # implementations raise what their own clients do, not only OSError
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, (TypeError, NotImplementedError)) or not made.wait(message):
                raise made.failure(message, "check the connection and the service") from error
