"""Checkpoint ids that are local folders, and the stores of these folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dcp_io import LocalStore, Store, StreamStore
from dcp_manifest import file_path, scheme_of
from dcp_manifest.errors import InvalidPlaceError

__all__ = ["is_local_id", "local_path", "store_of"]


def local_path(checkpoint_id: str | os.PathLike[str]) -> Path:
    """Return the path of the local folder that a checkpoint id names: a path, or a `file://` or `local://` URI.

    Raises:
        InvalidPlaceError: The id is empty, a URI of another scheme, or a URI that has lost a slash.
    """
    return Path(file_path(checkpoint_id))


def store_of(foreign_fs: Any, folder: Any) -> Store:
    """Return the store of a folder on `foreign_fs` (with stock's interface) or, for None, on the local file system."""
    return LocalStore(folder) if foreign_fs is None else StreamStore(foreign_fs, folder)


def is_local_id(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint id is a local folder that can be written: a path or URI below an existing writable folder.

    Source: torch 2.13 `FileSystem.validate_checkpoint_id` (same result for paths, but False for URIs).
    """
    if isinstance(checkpoint_id, Path):
        return True
    if scheme_of(checkpoint_id) != "file":
        return False
    try:
        path = local_path(checkpoint_id).absolute()
    except InvalidPlaceError:
        return False
    return any(os.access(parent, os.W_OK) for parent in (path, *path.parents) if parent.exists())
