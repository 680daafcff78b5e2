"""Sink and source for files of a file system with stock's stream interface (`FileSystemBase`)."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dcp_io.stores.store import Buffer, Sink, Source, Store
from dcp_manifest.errors import CorruptCheckpointError

_KNOWN = (io.BufferedWriter, io.FileIO, io.BytesIO)

__all__ = ["StreamFileSystem", "StreamSink", "StreamSource", "read_all"]


class StreamFileSystem(Protocol):
    """Protocol of a file system: the methods of stock's `FileSystemBase` that `StreamStore` calls."""

    def create_stream(self, path: Any, mode: str) -> AbstractContextManager[Any]:
        """Context manager that opens a stream on a file, with mode `rb` or `wb`, and closes it."""
        ...

    def concat_path(self, path: Any, suffix: str) -> Any:
        """Return the path of `suffix` below `path`."""
        ...

    def rename(self, path: Any, new_path: Any) -> None:
        """Rename a file."""
        ...

    def mkdir(self, path: Any) -> None:
        """Make a folder."""
        ...

    def exists(self, path: Any) -> bool:
        """Whether a file exists."""
        ...

    def rm_file(self, path: Any) -> None:
        """Remove a file."""
        ...


def read_all(fs: StreamFileSystem, place: Any) -> bytes:
    """Read all bytes of the file at the path `place`. Raises the errors of the file system `fs`."""
    with fs.create_stream(place, "rb") as stream:
        return bytes(stream.read())


class StreamSink(Sink):
    """Sink that writes to a stream. It counts the position itself, since most upload streams do not report a position.

    Args:
        fs: File system of the file.
        name: Name of the object in its store.
        place: Path of the file, in the form that `fs` uses.
    """

    def __init__(self, fs: StreamFileSystem, name: str, place: Any) -> None:
        self._fs = fs
        self._name = name
        self._place = place
        self._position = 0
        self._context = fs.create_stream(place, "wb")
        self._stream: Any = self._context.__enter__()
        self._open = True
        self._exists = True

    @property
    def name(self) -> str:
        """Name of the object."""
        return self._name

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._position

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append all bytes of the buffers to the file, in order."""
        for buffer in buffers:
            rest = memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")
            while rest:
                # Upload streams accept only `bytes`, may keep them, and some return None.
                written = self._stream.write(rest if isinstance(self._stream, _KNOWN) else bytes(rest))
                count = len(rest) if written is None else int(written)
                if count < 1:
                    raise OSError(f"{self._name}: the stream accepted none of {len(rest)} bytes")
                self._position += count
                rest = rest[count:]

    def close(self, *, sync: bool) -> None:
        """Complete the file; with `sync`, fsync it if the stream has a file descriptor."""
        if not self._open:
            return
        if sync:
            self._sync()
        self._open = False
        self._context.__exit__(None, None, None)

    def _sync(self) -> None:
        flush = getattr(self._stream, "flush", None)
        if flush is not None:
            flush()
        with contextlib.suppress(AttributeError, io.UnsupportedOperation):
            os.fsync(self._stream.fileno())

    def abort(self) -> None:
        """Close the stream as failed, and remove the file."""
        if self._open:
            self._open = False
            error = OSError(f"the write of {self._name} was aborted")
            with contextlib.suppress(Exception):
                self._context.__exit__(OSError, error, None)
        if self._exists:
            self._exists = False
            with contextlib.suppress(Exception):
                if self._fs.exists(self._place):
                    self._fs.rm_file(self._place)


class StreamSource(Source):
    """Source that reads from a stream. A stream has a single position, so reads run one at a time.

    Args:
        store: Store of the object.
        fs: File system of the file.
        name: Name of the object in its store.
        place: Path of the file, in the form that `fs` uses.
    """

    __slots__ = ("_context", "_lock", "_stream")

    def __init__(self, store: Store, fs: StreamFileSystem, name: str, place: Any) -> None:
        super().__init__(store, name)
        self._lock = threading.Lock()
        self._context = fs.create_stream(place, "rb")
        self._stream: Any = self._context.__enter__()

    def size(self) -> int:
        """Return the size of the file in bytes; a practically unlimited size if the stream cannot report its size."""
        with self._lock:
            try:
                self._stream.seek(0, os.SEEK_END)
                return int(self._stream.tell())
            except (ValueError, io.UnsupportedOperation):  # a stream over announced ranges, as of s3torchconnector
                return sys.maxsize

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers in order with the file's bytes from `offset` on."""
        with self._lock:
            self._stream.seek(offset)
            for buffer in buffers:
                self._fill(buffer, offset)
                offset += len(buffer)

    def _fill(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            count = self._read_some(buffer[done:])
            if not count:
                raise CorruptCheckpointError(
                    f"the file ends before byte {offset + len(buffer)}, which is needed: it is truncated",
                    file=self._name,
                    offset=offset + done,
                )
            done += count

    def _read_some(self, buffer: memoryview) -> int:
        if hasattr(self._stream, "readinto"):
            return self._stream.readinto(buffer) or 0
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the stream. May be called again."""
        context, self._context = self._context, contextlib.nullcontext()
        context.__exit__(None, None, None)
