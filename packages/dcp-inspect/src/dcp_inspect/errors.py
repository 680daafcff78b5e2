"""Errors of the command, in addition to those of the packages below it."""

from __future__ import annotations

from dcp_manifest import DcpError, UnsupportedFormatError

__all__ = ["CheckpointInUseError", "MissingValueError", "OtherFormatError"]


class CheckpointInUseError(DcpError, RuntimeError):
    """The checkpoint to remove is being read, or has been replaced since it was inspected."""


class MissingValueError(DcpError, LookupError):
    """The checkpoint has no value of that name."""


class OtherFormatError(UnsupportedFormatError):
    """The path holds no checkpoint, but files of another format, which a converter may read."""
