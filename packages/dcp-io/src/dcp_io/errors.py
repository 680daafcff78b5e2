"""Errors of saves and of storages. Those of reading are dcp_manifest's."""

from __future__ import annotations

from dcp_manifest.errors import CheckpointNotFoundError, DcpError

__all__ = [
    "CheckpointExistsError",
    "CheckpointReplacedError",
    "SaveInProgressError",
    "SaveLostError",
    "StorageError",
    "StoreNotFoundError",
]


class CheckpointExistsError(DcpError, FileExistsError):
    """A checkpoint exists, and the caller asked not to replace it."""


class SaveInProgressError(DcpError, FileExistsError):
    """Another save that is alive, or cannot be proven dead, writes to the same place."""


class SaveLostError(DcpError, RuntimeError):
    """The running save's marker is gone: another save took this one for dead, so it must not publish."""


class CheckpointReplacedError(CheckpointNotFoundError):
    """The checkpoint whose index was read has been replaced since: read the index again and start over.

    `save_id` is that of the checkpoint which is there now.
    """

    def __init__(self, message: str, *, save_id: str) -> None:
        super().__init__(message)
        self.save_id = save_id


class StorageError(DcpError, OSError):
    """The storage failed after all retries: it does not answer, or refuses. Messages never hold credentials."""


class StoreNotFoundError(DcpError, LookupError, RuntimeError):
    """No installed package opens stores of this kind, or two do."""
