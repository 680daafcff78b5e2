"""What a save may remove, and in which order: files that it replaced, and leftovers of dead saves. Nothing else."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from dcp_io.current import Current, rank_index_name
from dcp_io.markers import FoundMarker, Marker, belongs_to, is_marker_temporary
from dcp_io.store import TEMPORARY_SUFFIX, Entry, Store
from dcp_manifest.discover import METADATA_NAME, is_index_name
from dcp_manifest.errors import DcpError

__all__ = ["remove_dead_saves", "remove_leftovers", "remove_orphans", "remove_replaced", "replaced_names"]

_log = logging.getLogger(__name__)


def replaced_names(save_id: str, rank: int | None, current: Current, entries: Iterable[Entry]) -> tuple[str, ...]:
    """What nobody needs any more once the save is the published one: old indexes first, then old data files.

    Args:
        save_id: Of the new save.
        rank: Of this rank in a save without a coordinator, else None.
        current: The checkpoint that will be replaced.
        entries: The folder's listing.
    """
    indexes: list[str] = []
    for entry in entries:
        parts = rank_index_name(entry.name)
        is_old_rank_index = parts is not None and parts.save_id != save_id
        if is_old_rank_index or (entry.name == METADATA_NAME and rank is not None):
            indexes.append(entry.name)
    data = current.index.files if current.index is not None else ()
    return (*indexes, *data)


def remove_replaced(store: Store, marker: Marker, *, keep: Collection[str], world_size: int) -> bool:
    """Remove what a published save replaced; whether all of it is gone.

    Args:
        store: The checkpoint's folder.
        marker: Of the save, which is the current one.
        keep: Data files that the current index names: they stay whatever the marker says.
        world_size: Of the save, if it had no coordinator.
    """
    names = [name for name in marker.replaced if name not in keep and not _is_own(name, marker, world_size=world_size)]
    return _delete(store, names)


def remove_leftovers(store: Store, save_id: str, entries: Iterable[Entry], *, keep: Collection[str] = ()) -> bool:
    """Remove every file of a save that was not published; whether all of them are gone."""
    names = [entry.name for entry in entries if belongs_to(entry.name, save_id) and entry.name not in keep]
    return _delete(store, sorted(names, key=lambda name: (not is_index_name(name), name)))


def remove_dead_saves(store: Store, dead: Iterable[FoundMarker], current: Current, entries: list[Entry]) -> None:
    """Remove what dead saves left, and then their markers.

    A save whose index is the current one was killed after it published: what it replaced goes. Of any other, its own
    files go. While the current checkpoint cannot be read nothing is removed, since it cannot be told which is which.
    """
    if current.damage is not None:
        return
    index = current.index
    keep = index.files if index is not None else ()
    world_size = index.info.world_size if index is not None and index.info is not None else 0
    for found in dead:
        marker = found.marker
        if marker.save_id == current.save_id:
            done = remove_replaced(store, marker, keep=keep, world_size=world_size)
            temporary = [entry for entry in entries if entry.name.endswith(TEMPORARY_SUFFIX)]
            done = remove_leftovers(store, marker.save_id, temporary) and done
        else:
            done = remove_leftovers(store, marker.save_id, entries, keep=keep)
        if done:
            store.sync_folder()  # or a loss of power may bring files back, and not the marker that says whose they are
            _delete(store, [marker.name])


def remove_orphans(store: Store, entries: Iterable[Entry], *, now: float, stale_after_seconds: float) -> None:
    """Remove temporary files of markers whose save was killed before it had a marker, once they are old."""
    old = (entry for entry in entries if now - entry.mtime > stale_after_seconds)
    _delete(store, [entry.name for entry in old if is_marker_temporary(entry.name)])


def _is_own(name: str, marker: Marker, *, world_size: int) -> bool:
    """Whether a name that the marker lists has become part of the checkpoint that the marker's save made."""
    if belongs_to(name, marker.save_id):
        return True
    if name == METADATA_NAME:
        return marker.rank is None
    parts = rank_index_name(name)
    return parts is not None and parts.save_id is None and marker.rank is not None and parts.rank < world_size


def _delete(store: Store, names: Iterable[str]) -> bool:
    """Delete the objects in order; whether that worked for all. What fails is logged: the next save tries again."""
    failed = [name for name in names if not _delete_one(store, name)]
    return not failed


def _delete_one(store: Store, name: str) -> bool:
    try:
        store.delete(name)
    except (OSError, DcpError) as error:
        _log.warning("could not remove %r from %s, the next save will try again: %s", name, store.url, error)
        return False
    return True
