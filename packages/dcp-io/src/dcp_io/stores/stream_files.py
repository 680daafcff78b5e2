"""Sink and source for file systems with stock's stream interface."""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dcp_base.logs import library_logger
from dcp_io.errors import StorageError
from dcp_io.stores.store import Sink, Source
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.types import Buffer

_KNOWN = (io.BufferedWriter, io.FileIO, io.BytesIO)


class StreamFileSystem(Protocol):
    """The methods of stock's `FileSystemBase` that `StreamStore` calls."""

    def create_stream(self, path: Any, mode: str) -> AbstractContextManager[Any]:
        """Open a stream, with mode `rb` or `wb`."""
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
    """Read the whole file."""
    with fs.create_stream(place, "rb") as stream:
        return bytes(stream.read())


class StreamSink(Sink):
    """Sink to a stream; with `sync`, `close` fsyncs a stream with a file descriptor."""

    def __init__(self, fs: StreamFileSystem, name: str, place: Any, *, sync: bool) -> None:
        self._fs = fs
        self._name = name
        self._place = place
        self._sync = sync
        self._context = fs.create_stream(place, "wb")
        self._stream: Any = self._context.__enter__()
        self._open = True
        self._exists = True

    @property
    def name(self) -> str:
        """Name of the object."""
        return self._name

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append the buffers."""
        if not self._open:
            raise ValueError(f"{self._name} has been closed")
        for buffer in buffers:
            rest = memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")
            while rest:
                # Upload streams accept only `bytes`, may keep them, and some return None.
                written = self._stream.write(rest if isinstance(self._stream, _KNOWN) else bytes(rest))
                count = len(rest) if written is None else int(written)
                if count < 1:
                    raise OSError(f"{self._name}: the stream accepted none of {len(rest)} bytes")
                rest = rest[count:]

    def close(self) -> None:
        """Complete the file."""
        if not self._open:
            return
        if self._sync:
            flush = getattr(self._stream, "flush", None)
            if flush is not None:
                flush()
            with contextlib.suppress(AttributeError, io.UnsupportedOperation):
                os.fsync(self._stream.fileno())
        self._open = False
        self._context.__exit__(None, None, None)

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
    """Source on a stream. Its single position forces one read at a time."""

    __slots__ = ("_context", "_lock", "_name", "_stream")

    def __init__(self, fs: StreamFileSystem, name: str, place: Any) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._context = fs.create_stream(place, "rb")
        self._stream: Any = self._context.__enter__()

    def size(self) -> int:
        """Return the size in bytes; practically unlimited if unknown."""
        with self._lock:
            try:
                self._stream.seek(0, os.SEEK_END)
                return int(self._stream.tell())
            except (ValueError, io.UnsupportedOperation):  # a stream over announced ranges, as of s3torchconnector
                return sys.maxsize

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers."""
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
        """Close the stream."""
        context, self._context = self._context, contextlib.nullcontext()
        context.__exit__(None, None, None)


_log = library_logger(__name__)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0


class Attempts:
    """Retry counter of one request, which waits random, growing pauses between attempts.

    Neither `what`, the request and its object, nor messages may contain secrets.

    Args:
        limit: Limit of the number of attempts.
        retry_timeout_seconds: Time after which no further attempt is begun.
    """

    def __init__(self, what: str, limit: int, *, retry_timeout_seconds: float = math.inf) -> None:
        self._what = what
        self._limit = limit
        self._retry_timeout_seconds = retry_timeout_seconds
        self._started = time.monotonic()
        self.number = 1

    def wait(self, message: str) -> bool:
        """Log a failed attempt, and wait before the next; returns False immediately if no attempt is left."""
        longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**self.number)
        pause = longest * random.uniform(0.3, 1.0)  # noqa: S311 - spreads clients, no secret
        if self.number >= self._limit or time.monotonic() - self._started + pause > self._retry_timeout_seconds:
            return False
        _log.warning("%s failed (attempt %d of %d), trying again: %s", self._what, self.number, self._limit, message)
        time.sleep(pause)
        self.number += 1
        return True

    def failure(self, message: str, remedy: str) -> StorageError:
        """Return the error to raise after the last attempt; `remedy` is a clause."""
        seconds, plural = time.monotonic() - self._started, "s" * (self.number > 1)
        return StorageError(
            f"{self._what}: failed after {self.number} attempt{plural} in {seconds:.1f} s: {message}; {remedy}"
        )


class UploadSink(Sink):
    """Base class of sinks that upload to a service; `place` is the object's URI, for messages."""

    def __init__(self, name: str, place: str) -> None:
        self.place = place
        self.may_exist = False
        """Whether `abort` must remove the object from the service."""
        self.sent_bytes = 0
        self._name = name
        self._ended = False

    @property
    def name(self) -> str:
        """Name of the object."""
        return self._name

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send the buffers."""
        if self._ended:
            raise ValueError(f"{self.place} has been closed")
        for buffer in buffers:
            self.send(memoryview(buffer))
            self.sent_bytes += len(buffer)

    def close(self) -> None:
        """Complete the upload. The service determines its durability."""
        if not self._ended:
            self._ended = True
            self.complete()

    def abort(self) -> None:
        """Abort the upload, and remove a visible object."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(Exception):
                self.give_up()
        if self.may_exist:
            self.may_exist = False
            with contextlib.suppress(Exception):
                self.remove()

    @abstractmethod
    def send(self, view: memoryview) -> None:
        """Send the next bytes; see `Sink.write`."""

    @abstractmethod
    def complete(self) -> None:
        """Make the object from all bytes sent. Called at most once, and not after `give_up`."""

    @abstractmethod
    def give_up(self) -> None:
        """Cancel the upload, and release its resources. `abort` ignores errors."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the object from the service. `abort` ignores errors."""
