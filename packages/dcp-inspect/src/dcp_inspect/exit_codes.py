"""Exit codes of the command, by error class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

__all__ = [
    "DIFFERENT", "EXISTS", "INTERRUPTED", "KINDS", "NOT_FOUND", "UNREADABLE", "UNSAFE", "UNSUPPORTED", "WRONG_USE",
    "exit_code",
]  # fmt: skip

DIFFERENT = 1
"""`verify` found damage, or `diff` a difference."""
WRONG_USE = 2
NOT_FOUND = 3
UNREADABLE = 4
UNSUPPORTED = 5
UNSAFE = 6
EXISTS = 7
INTERRUPTED = 130
KINDS: Mapping[int, str] = MappingProxyType(
    {
        WRONG_USE: "usage",
        NOT_FOUND: "not_found",
        UNREADABLE: "failed",
        UNSUPPORTED: "unsupported",
        UNSAFE: "unsafe",
        EXISTS: "exists",
        INTERRUPTED: "interrupted",
    }
)
"""Exit code of an error → its name in JSON."""


def exit_code(error: BaseException) -> int | None:
    """Return the exit code for an error that a user can act on; None for a bug."""
    from dcp_manifest import DcpError  # noqa: PLC0415 - see `_codes`

    if not isinstance(error, DcpError | OSError):
        return None
    return next((code for kind, code in _codes() if isinstance(error, kind)), None)


def _codes() -> Iterator[tuple[type[BaseException], int]]:
    """Return the table of error classes and exit codes; the first match counts."""
    # Imported when something has gone wrong: `dcp plugins` and `dcp --help` need no numpy.
    from dcp_hooks import PluginNotFoundError  # noqa: PLC0415
    from dcp_io import SaveInProgressError, StoreNotFoundError  # noqa: PLC0415
    from dcp_manifest import errors  # noqa: PLC0415

    yield PluginNotFoundError, UNSUPPORTED
    yield StoreNotFoundError, UNSUPPORTED
    yield LookupError, NOT_FOUND
    yield errors.InvalidPlaceError, WRONG_USE
    yield errors.CheckpointNotFoundError, NOT_FOUND
    yield errors.UnsafeCheckpointError, UNSAFE
    yield errors.UnsupportedFormatError, UNSUPPORTED
    yield errors.CorruptCheckpointError, UNREADABLE
    yield SaveInProgressError, UNREADABLE
    yield FileExistsError, EXISTS
    yield errors.DcpError, UNREADABLE
    yield FileNotFoundError, NOT_FOUND
    yield OSError, UNREADABLE
