"""Base class of all errors of the project, and the errors of reading a checkpoint's index.

They live here because this is the lowest package; `dcp_core.errors` re-exports them.
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
    """Base class of all errors that these packages raise on purpose.

    Its message is safe for terminals and logs, whatever the names in it hold: see `printable`.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n\t")


class CheckpointNotFoundError(DcpError, FileNotFoundError):
    """There is no checkpoint at this place, or a file that it needs is missing."""


class CorruptCheckpointError(DcpError, ValueError):
    """Bytes of a checkpoint are not what was written: damaged, truncated, swapped or incomplete.

    The message names what is known of file, tensor and offset; the same facts are attributes.
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
    """An index to be written contradicts itself, or holds data that a manifest cannot."""


class InvalidPlaceError(DcpError, ValueError):
    """A path or URI names no place: it is empty, or a URI that lost a part on its way here."""


class UnsupportedFormatError(DcpError, ValueError):
    """The checkpoint was written by a newer version, or in a layout that this reader does not know."""


class UnsafeCheckpointError(DcpError, ValueError):
    """The checkpoint asks for something that a reader must not do: run code, or leave its folder."""
