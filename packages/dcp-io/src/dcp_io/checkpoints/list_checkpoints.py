"""Listing of the checkpoints below a folder (a store, path or URI), and of the saves running in a folder.

`dcp_manifest.folders.find_checkpoints` implements the search and the order.
"""

from __future__ import annotations

import os
import time

from dcp_io.saves.save_markers import find_markers
from dcp_io.stores.open_store import open_store
from dcp_io.stores.store import Store
from dcp_manifest.errors import CheckpointNotFoundError
from dcp_manifest.folders.find_checkpoints import FoundCheckpoint, check_files, checkpoints_below

__all__ = ["FoundCheckpoint", "check_files", "find_checkpoints", "running_saves"]


def find_checkpoints(root: Store | str | os.PathLike[str]) -> list[FoundCheckpoint[Store]]:
    """Return the checkpoints in a folder and its subfolders, newest first; see `dcp_manifest.checkpoints_below`.

    Args:
        root: A store, a path, or a URI that an installed storage handles. The folder may be missing.

    Raises:
        StorageError, OSError: The storage failed.

    Ranks: one; not collective.
    """
    return checkpoints_below(root if isinstance(root, Store) else open_store(root))


def running_saves(store: Store, *, stale_after_seconds: float) -> list[str]:
    """Return a description of each save in a folder that is running or cannot be proven dead.

    Args:
        store: The checkpoint's folder.
        stale_after_seconds: A save of another host counts as dead when its marker has not been renewed for this long.
    """
    now = time.time()
    try:
        found = find_markers(store, store.list())
    except CheckpointNotFoundError:
        return []
    return [each.describe(now) for each in found if not each.is_dead(now=now, stale_after_seconds=stale_after_seconds)]
