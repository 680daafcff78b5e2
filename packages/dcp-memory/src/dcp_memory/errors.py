"""Errors of keepers and of the stores in them."""

from __future__ import annotations

from dcp_io import StorageError
from dcp_manifest import DcpError

__all__ = ["KeeperFullError", "KeeperLostError", "KeeperRefusedError", "KeeperStartError"]


class KeeperFullError(DcpError, OSError):
    """The keeper, its control group or the machine has no memory left; `errno` is ENOSPC."""


class KeeperLostError(StorageError):
    """The keeper has ended or does not answer; what it held is lost, or out of reach."""


class KeeperRefusedError(DcpError, PermissionError):
    """The folder or the socket of keepers belongs to another user, or others can write to it."""


class KeeperStartError(DcpError, OSError):
    """A keeper could not be started."""
