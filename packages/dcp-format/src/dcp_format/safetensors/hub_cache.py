"""Folders of the Hugging Face cache, whose files are symbolic links into `blobs`.

Source: the layout that huggingface_hub documents: `models--ORG--NAME/snapshots/REVISION/FILE` → `../../blobs/HASH`.
"""

from __future__ import annotations

import os
from pathlib import Path

from dcp_io import LocalStore

__all__ = ["local_store"]


def local_store(folder: str | os.PathLike[str]) -> LocalStore:
    """Return the store of a folder. In a snapshot of a cache, the store also follows links into the cache's `blobs`."""
    for place in Path(os.path.realpath(folder)).parents:
        blobs = place.parent / "blobs"
        if place.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink():
            return LocalStore(folder, linked=blobs)
    return LocalStore(folder)
