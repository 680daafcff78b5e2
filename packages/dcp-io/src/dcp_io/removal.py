"""Removing a whole checkpoint: first what makes it one, then its files, then the folder. Leaves what is not ours."""

from __future__ import annotations

from dcp_io.current import read_current
from dcp_io.markers import is_marker
from dcp_io.store import TEMPORARY_SUFFIX, Store
from dcp_manifest.discover import DATA_SUFFIX, is_index_name

__all__ = ["remove_checkpoint"]


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
