"""Errors of keepers."""

from __future__ import annotations

from dcp_base import DcpError
from dcp_io import StorageError


class KeeperLostError(StorageError):
    """The keeper has ended or does not answer; its objects are lost or out of reach."""


class KeeperRefusedError(DcpError, PermissionError):
    """The directory or the socket of keepers belongs to another user, or others can write to it."""
