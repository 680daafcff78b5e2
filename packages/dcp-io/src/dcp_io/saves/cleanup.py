"""Cleanup after saves: removal of the files that a save replaced, and of leftovers of dead saves.

A forged marker or index may name any file. So a file is removed only if its own name and contents show that a save
made it (see `own_files`); other files are kept and logged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping

from dcp_io.saves.current_checkpoint import Current
from dcp_io.saves.own_files import is_own_file, own_name
from dcp_io.saves.save_markers import FoundMarker, Marker, is_marker_temporary
from dcp_io.stores.store import Entry, Store
from dcp_manifest.errors import CheckpointNotFoundError, DcpError, UnsafeCheckpointError
from dcp_manifest.file.manifest import read_index
from dcp_manifest.folders.file_names import METADATA_NAME, is_index_name, rank_index_name
from dcp_manifest.logs import library_logger

__all__ = [
    "remove_dead_saves",
    "remove_leftovers",
    "remove_orphans",
    "remove_own",
    "remove_replaced",
    "replaced_names",
]

_log = library_logger(__name__)


def replaced_names(save_id: str, rank: int | None, current: Current, entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return the names of the files that become obsolete when a save is published: indexes first, then data files.

    Args:
        save_id: Id of the new save.
        rank: Number of the calling rank in a save without a coordinator; otherwise None.
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
    """Remove the files that a published save replaced; returns True if none of these files is left.

    Args:
        store: The checkpoint's folder.
        marker: Marker of the save, whose checkpoint is the current one.
        keep: Data files in the current index, which are kept even if the marker lists them.
        world_size: World size of a save without a coordinator; not used for other saves.
    """
    named = [name for name in marker.replaced if name not in keep and not _is_own(name, marker, world_size=world_size)]
    if not named:
        return True
    sizes = _sizes(store, named)
    present = {name: size for name, size in sizes.items() if not _is_index_of(store, name, marker.save_id)}
    return _delete_made(store, present, f"marker {marker.name}")


def _sizes(store: Store, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes of those files that exist, in the given order; not every store lists all of its files."""
    listed = {entry.name: entry.bytes for entry in store.list()}
    found: dict[str, int] = {}
    for name in names:
        with contextlib.suppress(CheckpointNotFoundError, UnsafeCheckpointError):
            found[name] = listed[name] if name in listed else store.size(name)
    return found


def remove_leftovers(store: Store, save_id: str, entries: Iterable[Entry], *, keep: Collection[str] = ()) -> bool:
    """Remove every file of a save that was not published; returns True if none of these files is left.

    Args:
        store: The checkpoint's folder.
        save_id: Id of the save.
        entries: The folder's listing.
        keep: Names of files to keep.
    """
    sizes = {entry.name: entry.bytes for entry in entries if entry.name not in keep and _is_of(entry.name, save_id)}
    order = sorted(sizes, key=lambda name: (not is_index_name(name), name))
    return _delete_made(store, {name: sizes[name] for name in order}, f"save id {save_id}")


def remove_dead_saves(store: Store, dead: Iterable[FoundMarker], current: Current, entries: list[Entry]) -> None:
    """Remove the leftovers of dead saves, and then their markers.

    If the dead save published the current index, it was killed after publishing: the files that it replaced are
    removed. Otherwise the dead save's own files are removed. If the current index cannot be read, the two cases cannot
    be distinguished, and no file is removed.

    Args:
        store: The checkpoint's folder.
        dead: Markers of the dead saves.
        current: The current checkpoint of the folder.
        entries: The folder's listing.
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
            temporary = [entry for entry in entries if (own := own_name(entry.name)) is not None and own.temporary]
            done = remove_leftovers(store, marker.save_id, temporary) and done
        else:
            done = remove_leftovers(store, marker.save_id, entries, keep=keep)
        if done:
            store.sync_folder()  # or a loss of power may bring files back without their marker
            _delete_made(store, {marker.name: found.entry.bytes}, "its name")


def remove_orphans(store: Store, entries: Iterable[Entry], *, now: float, stale_after_seconds: float) -> None:
    """Remove old temporary files of save markers, left by saves that were killed before they renamed the marker.

    Args:
        store: The checkpoint's folder.
        entries: The folder's listing.
        now: Current time on the storage's clock, seconds.
        stale_after_seconds: Age of a temporary file from which on it is removed.
    """
    old = (entry for entry in entries if abs(now - entry.mtime) > stale_after_seconds)
    _delete_made(store, {entry.name: entry.bytes for entry in old if is_marker_temporary(entry.name)}, "its name")


def remove_own(store: Store, sizes: Mapping[str, int]) -> list[str]:
    """Remove the files whose names and contents show that saves made them; returns the names of the files kept.

    Args:
        store: The checkpoint's folder.
        sizes: Name of each file → size in bytes, from the listing; files are removed in this order.

    Raises:
        OSError: The storage failed.
    """
    left = []
    for name, size in sizes.items():
        try:
            own = is_own_file(store, name, size)
        except CheckpointNotFoundError:
            continue
        if own:
            store.delete(name)
        else:
            left.append(name)
    return left


def _is_of(name: str, save_id: str) -> bool:
    """Whether a file's name is that of a file of this save, other than its marker."""
    own = own_name(name)
    return own is not None and own.save_id == save_id and (own.temporary or own.kind != "note")


def _is_own(name: str, marker: Marker, *, world_size: int) -> bool:
    """Whether a file that the marker lists as replaced belongs to the new checkpoint after all."""
    own = own_name(name)
    if own is not None and own.save_id == marker.save_id:
        return True
    if name == METADATA_NAME:
        return marker.rank is None
    parts = rank_index_name(name)
    return parts is not None and parts.save_id is None and marker.rank is not None and parts.rank < world_size


def _is_index_of(store: Store, name: str, save_id: str) -> bool:
    """Whether an index without a save id in its name was written by this save."""
    own = own_name(name)
    if own is None or own.kind != "index" or own.save_id is not None:
        return False
    try:
        info = read_index(store.read(name), file=name).info
    except DcpError:  # damaged, or gone
        return False
    return info is not None and info.save_id == save_id


def _delete_made(store: Store, sizes: Mapping[str, int], named_by: str) -> bool:
    """Delete the files in order, except those that no save made; returns whether this succeeded.

    Failures are logged: the next save tries again.
    """
    failed = [name for name, size in sizes.items() if not _delete_one(store, name, size, named_by)]
    return not failed


def _delete_one(store: Store, name: str, size: int, named_by: str) -> bool:
    try:
        left = remove_own(store, {name: size})
    except (OSError, DcpError) as error:
        _log.warning("could not remove %r from %s, the next save will try again: %s", name, store.url, error)
        return False
    if left:
        _log.warning(
            "%r in %s stays, although %s names it: its name or contents are not those of a save's file; remove it if "
            "you do not need it",
            name,
            store.url,
            named_by,
        )
    return True
