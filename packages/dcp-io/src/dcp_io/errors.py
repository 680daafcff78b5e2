"""Errors of saves and storages; for reading see `dcp_manifest.errors`."""

from __future__ import annotations

from dcp_base.errors import DcpError
from dcp_manifest.errors import CheckpointNotFoundError


class CheckpointExistsError(DcpError, FileExistsError):
    """The folder has a checkpoint, and overwriting was not allowed."""


class SaveInProgressError(DcpError, FileExistsError):
    """Another save, alive or not provably dead, is writing to the folder."""


class CheckpointReplacedError(CheckpointNotFoundError):
    """A newer save, `save_id`, replaced the checkpoint after its index was read: repeat the load."""

    def __init__(self, message: str, *, save_id: str) -> None:
        super().__init__(message)
        self.save_id = save_id


class StorageError(DcpError, OSError):
    """The storage failed after all retries. Messages never contain credentials."""
