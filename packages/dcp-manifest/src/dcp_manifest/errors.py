"""Errors of reading and writing an index; `dcp_core.errors` re-exports them."""

from __future__ import annotations

from dcp_base.errors import DcpError


class CheckpointNotFoundError(DcpError, FileNotFoundError):
    """The checkpoint, or one of its files, is missing."""


class CorruptCheckpointError(DcpError, ValueError):
    """Bytes of a checkpoint differ from what was written: damaged, truncated, swapped or incomplete.

    The message and the attributes name the file, the tensor's key, and the offset in bytes, if known.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        key: str | None = None,
        offset: int | None = None,
    ) -> None:
        where = [
            f"{label} {value!r}" if label != "offset" else f"{label} {value}"
            for label, value in (("file", file), ("key", key), ("offset", offset))
            if value is not None
        ]
        super().__init__(f"{message} ({', '.join(where)})" if where else message)
        self.file = file
        self.key = key
        self.offset = offset


class UnsupportedFormatError(DcpError, ValueError):
    """A newer version or an unknown layout wrote the checkpoint, or an index cannot be written."""


class UnsafeCheckpointError(DcpError, ValueError):
    """The checkpoint is hostile: reading it would run code, or access files outside its folder."""
