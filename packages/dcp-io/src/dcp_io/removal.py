"""Removing a whole checkpoint, or what dead saves left beside one. Leaves what is not ours."""

from __future__ import annotations

import time

from dcp_io.cleanup import remove_dead_saves
from dcp_io.current import read_current
from dcp_io.markers import find_markers, is_marker
from dcp_io.store import TEMPORARY_SUFFIX, Store
from dcp_manifest.discover import DATA_SUFFIX, is_index_name

__all__ = ["clear_dead_saves", "remove_checkpoint"]


def remove_checkpoint(store: Store, *, also: frozenset[str] = frozenset()) -> list[str]:
    """Remove a checkpoint and whatever saves have left in its folder; the names of files that are not theirs and stay.

    The index goes first: when this is interrupted, what is left is no checkpoint, and calling again ends the work.

    Args:
        store: The checkpoint's folder; nothing happens if it is missing. Nobody may be saving to it.
        also: Names of further files that belong to the checkpoint; they go last.

    Raises:
        OSError: The storage failed.

    Ranks: one.
    """
    names = sorted(entry.name for entry in store.list())
    ours = [name for name in names if is_index_name(name)]
    ours += [name for name in names if name.endswith((DATA_SUFFIX, TEMPORARY_SUFFIX)) or is_marker(name)]
    ours += [name for name in names if name in also]
    index = read_current(store).index
    below = () if index is None else tuple(name for name in index.files if name not in names)
    for name in dict.fromkeys((*ours, *below)):
        store.delete(name)
    left = [name for name in names if name not in ours]
    if not left:
        store.remove_folder()
    return left


def clear_dead_saves(store: Store, *, stale_after_seconds: float) -> None:
    """Remove what saves that are certainly over have left beside a checkpoint: their files, if it is not theirs.

    What the next save to the same folder would do first; for folders to which nobody saves again.

    Args:
        store: The checkpoint's folder.
        stale_after_seconds: After so long without a sign of life a save of another host counts as dead.

    Raises:
        OSError: The storage failed.
    """
    entries = store.list()
    now = time.time()
    found = find_markers(store, entries)
    dead = [each for each in found if each.is_dead(now=now, stale_after_seconds=stale_after_seconds)]
    if dead:
        remove_dead_saves(store, dead, read_current(store, entries), entries)
