"""Errors of the command beside those of the packages below it."""

from __future__ import annotations

from dcp_manifest import DcpError, UnsupportedFormatError

__all__ = ["CheckpointInUseError", "MissingValueError", "OtherFormatError"]


class CheckpointInUseError(DcpError, RuntimeError):
    """Somebody reads the checkpoint that should be removed, or it is not the one that was looked at."""


class MissingValueError(DcpError, LookupError):
    """A name that was asked for is not in the checkpoint."""


class OtherFormatError(UnsupportedFormatError):
    """What is there is no checkpoint, but files that a converter may read."""
