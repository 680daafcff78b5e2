"""Exit codes of the command, and which error gives which."""

from __future__ import annotations

from dcp_inspect.errors import MissingValueError
from dcp_manifest import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
)

__all__ = ["DIFFERENT", "EXISTS", "INTERRUPTED", "NOT_FOUND", "UNREADABLE", "UNSAFE", "UNSUPPORTED", "exit_code"]

DIFFERENT = 1
"""`verify` found damage, or `diff` a difference."""
NOT_FOUND = 3
UNREADABLE = 4
UNSUPPORTED = 5
UNSAFE = 6
EXISTS = 7
INTERRUPTED = 130

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (CheckpointNotFoundError, NOT_FOUND),
    (UnsafeCheckpointError, UNSAFE),
    (UnsupportedFormatError, UNSUPPORTED),
    (CorruptCheckpointError, UNREADABLE),
    (FileExistsError, EXISTS),
    (MissingValueError, NOT_FOUND),
    (KeyError, NOT_FOUND),
    (DcpError, UNREADABLE),
    (FileNotFoundError, NOT_FOUND),
    (OSError, UNREADABLE),
)


def exit_code(error: BaseException) -> int | None:
    """The exit code for an error that a user can do something about; None for a fault of the program."""
    if isinstance(error, KeyError) and not isinstance(error, DcpError):
        return None
    return next((code for kind, code in _CODES if isinstance(error, kind)), None)
