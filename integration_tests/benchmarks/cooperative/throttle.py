"""Storage with a limit of bytes per second that all processes of a machine share, and slow ranks if asked for."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import dcp_all as dcp
from dcp_io import LocalStore, Source

__all__ = ["ThrottledReader", "TokenBucket"]

_DUE = struct.Struct("d")
_BURST_SECONDS = 0.01
_STEP_BYTES = 256 << 10


class TokenBucket:
    """A limit of bytes per second. Thread-safe, and shared by all processes that name the same file.

    Args:
        path: File that holds the time at which the next byte may flow; made if it is missing.
        bytes_per_second: The limit.
    """

    def __init__(self, path: str, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        os.ftruncate(self._file, _DUE.size)
        self._memory = mmap.mmap(self._file, _DUE.size)
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Wait until so many bytes may flow. A wait that took too long is made good, up to a hundredth of a second."""
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                (due,) = _DUE.unpack_from(self._memory)
                due = max(due, time.monotonic() - _BURST_SECONDS) + size / self._rate
                _DUE.pack_into(self._memory, 0, due)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)
        time.sleep(max(0.0, due - time.monotonic()))


class _ThrottledSource(Source):
    def __init__(self, buckets: Sequence[TokenBucket], source: Source) -> None:
        self._buckets, self._source = buckets, source

    def size(self) -> int:
        return self._source.size()

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            for start in range(0, len(buffer), _STEP_BYTES):
                part = buffer[start : start + _STEP_BYTES]
                for bucket in self._buckets:
                    bucket.take(len(part))
                self._source.read_into(offset, [part])
                offset += len(part)

    def close(self) -> None:
        self._source.close()


class _ThrottledStore(LocalStore):
    def __init__(self, path: str, buckets: Sequence[TokenBucket]) -> None:
        super().__init__(path)
        self.buckets = buckets

    @property
    def place(self) -> Any:
        return "remote"

    def open(self, name: str) -> Source:
        return _ThrottledSource(self.buckets, super().open(name))


class ThrottledReader(dcp.FileSystemReader):
    """Reader of a folder that takes the bytes of data files through token buckets, and says that they are remote."""

    def __init__(self, path: str, buckets: Sequence[TokenBucket]) -> None:
        self._buckets = buckets
        super().__init__(path)

    def _open(self, checkpoint_id: Any) -> Any:
        backend = super()._open(checkpoint_id)
        backend.store = _ThrottledStore(backend.store.url, self._buckets)
        return backend
