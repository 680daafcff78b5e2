"""Base class of all errors of the project, and the errors of reading a checkpoint's index.

The errors are defined in the package that all others import; `dcp_core.errors` re-exports them.
"""

from __future__ import annotations

from dcp_manifest.printable import printable

__all__ = [
    "CheckpointNotFoundError",
    "CorruptCheckpointError",
    "DcpError",
    "InvalidIndexError",
    "InvalidPlaceError",
    "UnsafeCheckpointError",
    "UnsupportedFormatError",
]


class DcpError(Exception):
    """Base class of the errors that these packages define.

    The message is safe for terminals and logs: control characters in names are escaped by `printable`.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n\t")

    def name_place(self, place: str) -> None:
        """Put the path or URI of a checkpoint before the message, unless it is there."""
        message = str(self.args[0]) if self.args else ""
        if not message.startswith(f"{place}: "):
            self.args = (f"{place}: {message}", *self.args[1:])


class CheckpointNotFoundError(DcpError, FileNotFoundError):
    """There is no checkpoint in a folder, or a file of the checkpoint is missing."""


class CorruptCheckpointError(DcpError, ValueError):
    """Bytes of a checkpoint differ from what was written: damaged, truncated, swapped or incomplete.

    The message names the file, the key of the tensor, and the offset in bytes, if known; these are also attributes.
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


class InvalidIndexError(DcpError, ValueError):
    """An index to be written is inconsistent, or contains data that a manifest cannot store."""


class InvalidPlaceError(DcpError, ValueError):
    """A path or URI is invalid: it is empty, or looks like a mistyped URI, such as `s3:/bucket` with one slash."""


class UnsupportedFormatError(DcpError, ValueError):
    """The checkpoint was written by a newer version, or in an unknown layout."""


class UnsafeCheckpointError(DcpError, ValueError):
    """The checkpoint is hostile: reading it would run code, or access files outside of its folder."""
