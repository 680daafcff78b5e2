"""Errors of saves and of storages. Errors of reading a checkpoint are in `dcp_manifest.errors`."""

from __future__ import annotations

import os
import shlex

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
        file = path
        while not os.path.lexists(file) and os.path.dirname(file) != file:
            file = os.path.dirname(file)
        if file != path:
            return cls(f"there can be no checkpoint at {path}: {file} is a file, and a checkpoint is a folder")
        return cls(
            f"{path} is a file, and a checkpoint is a folder: save to another place. To load a torch.save or "
            f"safetensors file, convert it first: `dcp convert {shlex.quote(path)} FOLDER` in a shell, or "
            f"dcp_format.convert({path!r}, 'FOLDER') in Python; both come with dcp-all, or dcp-format and dcp-inspect"
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
