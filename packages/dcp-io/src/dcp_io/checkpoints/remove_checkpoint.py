"""Removal of a whole checkpoint, or of leftovers of dead saves. Files that no save made are kept."""

from __future__ import annotations

import time
from collections.abc import Collection

from dcp_io.saves.cleanup import remove_dead_saves, remove_own
from dcp_io.saves.current_checkpoint import read_current
from dcp_io.saves.own_files import is_own_file, own_name
from dcp_io.saves.save_markers import find_markers
from dcp_io.stores.store import Store
from dcp_manifest.errors import CheckpointNotFoundError, DcpError
from dcp_manifest.folders.file_names import is_index_name

__all__ = ["checkpoint_files", "clear_dead_saves", "remove_checkpoint"]


def checkpoint_files(store: Store, named: Collection[str] = ()) -> dict[str, int]:
    """Return name → size in bytes of the files that `remove_checkpoint` would remove, in the order of removal.

    Args:
        store: The checkpoint's folder.
        named: Names of the data files that the index lists; they may be in subfolders.

    Raises:
        OSError: The storage failed.
    """
    sizes = _in_order(store, named)
    return {name: size for name, size in sizes.items() if is_index_name(name) or _is_there(store, name, size)}


def remove_checkpoint(store: Store, *, also: frozenset[str] = frozenset()) -> list[str]:
    """Remove a checkpoint and the leftovers of saves from its folder; returns the names of the files that remain.

    The index is removed first, then all files whose names and first bytes show that a save made them. After an
    interruption no loadable checkpoint is left, and a second call completes the removal.

    Args:
        store: The checkpoint's folder; nothing happens if it is missing. No process may be saving to it.
        also: Names of further files to remove, whatever their contents; they are removed last.

    Raises:
        OSError: The storage failed.

    Ranks: one.
    """
    index = read_current(store).index
    sizes = _in_order(store, () if index is None else index.files)
    for name in [name for name in sizes if is_index_name(name)]:
        del sizes[name]
        store.delete(name)
    last = sorted(also & sizes.keys())
    left = remove_own(store, {name: size for name, size in sizes.items() if name not in also})
    for name in last:
        store.delete(name)
    if not left:
        store.remove_folder()
    return sorted(left)


def clear_dead_saves(store: Store, *, stale_after_seconds: float) -> None:
    """Remove the leftovers of dead saves from a checkpoint's folder.

    The next save to the folder also does this, so it is needed only for folders without a next save.

    Args:
        store: The checkpoint's folder.
        stale_after_seconds: A save of another host counts as dead when its marker has not been renewed for this long.

    Raises:
        OSError: The storage failed.
    """
    entries = store.list()
    now = time.time()
    dead, alive = [], set()
    for found in find_markers(store, entries):
        if found.is_dead(now=now, stale_after_seconds=stale_after_seconds):
            dead.append(found)
        else:
            alive.add(found.marker.save_id)
    over = [found for found in dead if found.marker.save_id not in alive]  # other ranks of the same save may be alive
    if over:
        remove_dead_saves(store, over, read_current(store, entries), entries)


def _in_order(store: Store, named: Collection[str]) -> dict[str, int]:
    """Return names and sizes of the folder's files, and of named files in subfolders: indexes first, notes last."""
    sizes = {entry.name: entry.bytes for entry in store.list()}
    for name in {*named} - sizes.keys():
        size = _size_below(store, name)
        if size is not None:
            sizes[name] = size
    return dict(sorted(sizes.items(), key=lambda item: (not is_index_name(item[0]), _is_note(item[0]), item[0])))


def _is_there(store: Store, name: str, size: int) -> bool:
    try:
        return is_own_file(store, name, size)
    except CheckpointNotFoundError:  # another process has removed it since it was listed
        return False


def _is_note(name: str) -> bool:
    own = own_name(name)
    return own is not None and own.kind == "note"


def _size_below(store: Store, name: str) -> int | None:
    """Return the size of a file in a subfolder, bytes; None if it is missing, or a link out of the folder."""
    try:
        return store.size(name) if "/" in name else None
    except DcpError as error:
        if isinstance(error, OSError) and not isinstance(error, CheckpointNotFoundError):
            raise
        return None
