"""Errors of the command beside those of the packages below it."""

from __future__ import annotations

from dcp_manifest import DcpError

__all__ = ["MissingValueError"]


class MissingValueError(DcpError, LookupError):
    """A name that was asked for is not in the checkpoint."""
