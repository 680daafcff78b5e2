"""Errors of saves and of storages. Errors of reading a checkpoint are in `dcp_manifest.errors`."""

from __future__ import annotations

from dcp_manifest.errors import CheckpointNotFoundError, DcpError

__all__ = [
    "CheckpointExistsError",
    "CheckpointReplacedError",
    "NotAFolderError",
    "SaveInProgressError",
    "SaveLostError",
    "StorageError",
    "StoreNotFoundError",
]


class CheckpointExistsError(DcpError, FileExistsError):
    """The folder already has a checkpoint, and the caller did not allow this save to overwrite it."""


class NotAFolderError(DcpError, NotADirectoryError):
    """The path of a checkpoint is, or leads through, a file; a checkpoint is a folder."""

    @classmethod
    def of(cls, path: str) -> NotAFolderError:
        """Return the error for a path, with advice on files of other formats."""
        return cls(
            f"{path} is a file, or below one, and a checkpoint is a folder. Files of torch.save and safetensors: "
            "dcp_format.convert (`dcp convert FILE FOLDER`) makes a checkpoint of one; to load them as they are, pass "
            "storage_reader=BroadcastingTorchSaveReader() or HuggingFaceStorageReader(folder)"
        )


class SaveInProgressError(DcpError, FileExistsError):
    """Another save, which is alive or cannot be proven dead, is writing to the same folder."""


class SaveLostError(DcpError, RuntimeError):
    """The marker of the running save is gone: another save took the running one for dead, and publishing is refused."""


class CheckpointReplacedError(CheckpointNotFoundError):
    """The checkpoint was replaced by a newer save after its index was read: repeat the load.

    `save_id` is the id of the newer save.
    """

    def __init__(self, message: str, *, save_id: str) -> None:
        super().__init__(message)
        self.save_id = save_id


class StorageError(DcpError, OSError):
    """The storage did not answer or refused the request, after all retries. Messages never contain credentials."""


class StoreNotFoundError(DcpError, LookupError, RuntimeError):
    """No installed package opens stores of a URI's scheme, or two packages do."""
