"""Errors of saves and of storages; errors of reading are in `dcp_manifest.errors`."""

from __future__ import annotations

from dcp_base.errors import DcpError
from dcp_manifest.errors import CheckpointNotFoundError

__all__ = [
    "CheckpointExistsError",
    "CheckpointReplacedError",
    "SaveInProgressError",
    "StorageError",
]


class CheckpointExistsError(DcpError, FileExistsError):
    """The folder already has a checkpoint, and overwriting was not allowed."""


class SaveInProgressError(DcpError, FileExistsError):
    """Another save, which is alive or cannot be proven dead, is writing to the same folder."""


class CheckpointReplacedError(CheckpointNotFoundError):
    """The checkpoint was replaced by a newer save after its index was read: repeat the load.

    `save_id` is the id of the newer save.
    """

    def __init__(self, message: str, *, save_id: str) -> None:
        super().__init__(message)
        self.save_id = save_id


class StorageError(DcpError, OSError):
    """The storage failed after all retries. Messages never contain credentials."""
