"""`FsspecSink`: one file while it is written, by whatever its file system does for that."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from dcp_fsspec.requests import repeated
from dcp_io import Sink

__all__ = ["FsspecSink"]


class FsspecSink(Sink):
    """A new file.

    Args:
        fs: The file system.
        name: Of the file in its store.
        path: Of the file in the file system.
        exclusive: Whether the file system itself refuses to replace a file that is there.
        block_bytes: Size of the parts of an upload.
    """

    def __init__(self, fs: Any, name: str, path: str, *, exclusive: bool, block_bytes: int) -> None:
        self._fs = fs
        self._name = name
        self._path = path
        self._position = 0
        self._may_exist = True
        mode = "xb" if exclusive else "wb"
        self._file: Any = self._once("open", lambda: fs.open(path, mode, block_size=block_bytes))

    @property
    def name(self) -> str:
        """Name of the file in its store."""
        return self._name

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        """Hand the buffers to the file, which copies them."""
        if self._file is None:
            raise ValueError(f"{self._path} has been closed")
        for buffer in buffers:
            self._once("write", lambda buffer=buffer: self._file.write(buffer))
            self._position += len(buffer)

    def close(self, *, sync: bool) -> None:
        """Complete the file. What `sync` adds to that depends on the file system; nothing is flushed machine-wide."""
        del sync
        if self._file is not None:
            file, self._file = self._file, None
            try:
                self._once("close", file.close)
            except BaseException:
                _discard(file)
                raise

    def abort(self) -> None:
        """Give up the upload, and remove what can be seen of it."""
        if self._file is not None:
            file, self._file = self._file, None
            _discard(file)
        if self._may_exist:
            self._may_exist = False
            with contextlib.suppress(Exception):
                self._fs.rm_file(self._path)

    def _once(self, what: str, function: Any) -> Any:
        try:
            return repeated(f"{what} {self._path}", function, attempts=1)
        except FileExistsError as error:
            self._may_exist = False
            raise FileExistsError(f"{self._path} exists already") from error


def _discard(file: Any) -> None:
    """End an upload without completing it, as far as the file system can; the object must not do so later by itself."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(Exception):
        file.closed = True
    with contextlib.suppress(Exception):
        file.close()
