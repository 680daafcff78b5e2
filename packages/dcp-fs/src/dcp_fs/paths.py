"""Which checkpoint ids mean a local folder."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_local_id", "local_path"]

_FILE_SCHEME = "file://"


def local_path(checkpoint_id: str | os.PathLike[str]) -> Path:
    """The folder that an id names; `file://` URIs are accepted."""
    text = os.fspath(checkpoint_id)
    return Path(text.removeprefix(_FILE_SCHEME))


def is_local_id(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether an id names a folder that could be written here: a path, under an existing writable folder.

    Source: torch 2.13 `FileSystem.validate_checkpoint_id` (same answer, plus `file://`).
    """
    if isinstance(checkpoint_id, Path):
        return True
    text = os.fspath(checkpoint_id)
    if "://" in text and not text.startswith(_FILE_SCHEME):
        return False
    path = local_path(checkpoint_id).absolute()
    return any(os.access(parent, os.W_OK) for parent in (path, *path.parents) if parent.exists())
