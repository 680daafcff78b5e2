"""`FsspecSink`: upload of one file through an fsspec file system."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from dcp_fsspec.requests import repeated
from dcp_io import UploadSink

__all__ = ["FsspecSink"]


class FsspecSink(UploadSink):
    """Sink that uploads a new file through an fsspec file system.

    Args:
        fs: The file system.
        name: Name of the file in its store.
        path: Path of the file in the file system.
        exclusive: Whether the file system itself can create a file only if none exists (mode `xb`).
        block_bytes: Size of the parts of an upload, bytes.
    """

    def __init__(self, fs: Any, name: str, path: str, *, exclusive: bool, block_bytes: int) -> None:
        super().__init__(name, path)
        self._fs = fs
        self.may_exist = True
        mode = "xb" if exclusive else "wb"
        self._file: Any = self._once("open", lambda: fs.open(path, mode, block_size=block_bytes))

    def send(self, view: memoryview) -> None:
        """Write the bytes to the file, whose buffer copies them."""
        self._once("write", lambda: self._file.write(view))

    def complete(self) -> None:
        """Close the file, which uploads the last bytes and makes the file visible."""
        try:
            self._once("close", self._file.close)
        except BaseException as error:
            mine = isinstance(error, FileExistsError) and self._is_there()
            self.give_up()
            if not mine:
                raise
            self.may_exist = True

    def _is_there(self) -> bool:
        """Whether the existing file of that name holds exactly these bytes.

        If so, the client's first attempt, whose response was lost, made the file, and the client's retry was refused.
        """
        buffer = getattr(self._file, "buffer", None)
        held = buffer.getvalue() if isinstance(buffer, io.BytesIO) else None
        if held is None or len(held) != self.tell():  # parts of it were sent before: only the whole can be compared
            return False
        try:
            return bool(repeated(f"read {self.place}", lambda: self._fs.cat_file(self.place)) == held)
        except OSError:
            return False

    def give_up(self) -> None:
        """Abort the upload, if the file system can.

        Without this, the file object could complete the upload when it is garbage-collected.
        """
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True
        with contextlib.suppress(Exception):
            self._file.close()

    def remove(self) -> None:
        """Remove the file."""
        self._fs.rm_file(self.place)

    def _once(self, what: str, function: Any) -> Any:
        try:
            return repeated(f"{what} {self.place}", function, attempts=1)
        except FileExistsError as error:
            self.may_exist = False
            raise FileExistsError(f"{self.place} exists already") from error
