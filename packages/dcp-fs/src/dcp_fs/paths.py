"""Which checkpoint ids mean a local folder."""

from __future__ import annotations

import os
from pathlib import Path

from dcp_manifest.errors import InvalidPlaceError
from dcp_manifest.schemes import file_path, scheme_of

__all__ = ["is_local_id", "local_path"]


def local_path(checkpoint_id: str | os.PathLike[str]) -> Path:
    """The folder that an id names; `file://` and `local://` URIs are accepted. Raises InvalidPlaceError: `file_path`."""
    return Path(file_path(checkpoint_id))


def is_local_id(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether an id names a folder that could be written here: a path, under an existing writable folder.

    Source: torch 2.13 `FileSystem.validate_checkpoint_id` (same answer, plus URIs).
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
