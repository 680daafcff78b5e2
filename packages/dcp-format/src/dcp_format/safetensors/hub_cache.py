"""Folders of the Hugging Face cache, whose files are links into a folder beside them.

Source: the layout that huggingface_hub documents: `models--ORG--NAME/snapshots/REVISION/FILE` → `../../blobs/HASH`.
"""

from __future__ import annotations

import os
from pathlib import Path

from dcp_io import LocalStore

__all__ = ["local_store"]


def local_store(folder: str | os.PathLike[str]) -> LocalStore:
    """The store of a folder; in a snapshot of a cache, links into that cache's own `blobs` are followed, no others."""
    for place in Path(os.path.realpath(folder)).parents:
        blobs = place.parent / "blobs"
        if place.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink():
            return LocalStore(folder, linked=blobs)
    return LocalStore(folder)
