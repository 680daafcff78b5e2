"""Removal of the files that a save replaced, and of leftovers of dead saves.

A forged marker or index may name any file, so only files of saves are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from dcp_base.errors import DcpError
from dcp_base.logs import library_logger
from dcp_io.saves.save_files import DIGESTS, FoundMarker, Marker, is_marker_temporary, is_own_file, own_name
from dcp_io.stores.store import Entry, Store
from dcp_io.workers import StopSignal, run_together
from dcp_manifest.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
)
from dcp_manifest.file.manifest_read import read_index
from dcp_manifest.folders.folder import METADATA_NAME, is_index_name, rank_index_name
from dcp_manifest.folders.index_choice import current_index
from dcp_manifest.index.columns import CheckpointIndex

STALE_AFTER_SECONDS = 3600.0
"""Age of another host's marker, which a running save renews, at which its save counts as dead."""

_log = library_logger(__name__)
# Requests to a storage take longer than work of this process. Fewer files are not worth a thread.
_STREAMS, _STREAM_FILES = 8, 4
_Errors = dict[str, Exception] | None


def replaced_names(save_id: str, rank: int | None, current: Current, entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return the files that a new save makes obsolete, indexes first. `rank` is set in a save without a coordinator."""
    indexes: list[str] = []
    digests: list[str] = []
    for entry in entries:
        if DIGESTS.fullmatch(entry.name):
            digests.append(entry.name)
        parts = rank_index_name(entry.name)
        is_old_rank_index = parts is not None and parts.save_id != save_id
        if is_old_rank_index or (entry.name == METADATA_NAME and rank is not None):
            indexes.append(entry.name)
    data = current.index.files if current.index is not None else ()
    return (*indexes, *data, *digests)


def remove_replaced(store: Store, marker: Marker, *, keep: Collection[str], world_size: int) -> bool:
    """Remove the files that a published save replaced; True if none is left."""
    named = [name for name in marker.replaced if name not in keep and not _is_own(name, marker, world_size=world_size)]
    if not named:
        return True
    listed = {entry.name: entry.bytes for entry in store.list()}
    present: dict[str, int] = {}
    for name in named:
        with contextlib.suppress(CheckpointNotFoundError, UnsafeCheckpointError):
            size = listed[name] if name in listed else store.size(name)
            if not _is_index_of(store, name, marker.save_id):
                present[name] = size
    return _delete_made(store, present, f"marker {marker.name}")


def remove_leftovers(store: Store, save_id: str, entries: Iterable[Entry], *, keep: Collection[str] = ()) -> bool:
    """Remove an unpublished save's files; True if none is left."""
    sizes = {entry.name: entry.bytes for entry in entries if entry.name not in keep and _is_of(entry.name, save_id)}
    return _delete_made(store, sizes, f"save id {save_id}")


def remove_dead_saves(store: Store, dead: Iterable[FoundMarker], current: Current, entries: list[Entry]) -> None:
    """Remove the leftovers of dead saves, and then their markers.

    If a dead save published the current index, these are the files that it replaced, otherwise its own. If the current
    index cannot be read, no file is removed.
    """
    if current.damage is not None:
        return
    index = current.index
    keep = index.files if index is not None else ()
    world_size = index.info.world_size if index is not None and index.info is not None else 0
    over: dict[str, int] = {}
    for save_id in dict.fromkeys(found.marker.save_id for found in dead):
        published = save_id == current.save_id
        left = [entry for entry in entries if not published or ((own := own_name(entry.name)) and own.temporary)]
        done = remove_leftovers(store, save_id, left, keep=keep)
        for found in [found for found in dead if found.marker.save_id == save_id]:
            if published and not remove_replaced(store, found.marker, keep=keep, world_size=world_size):
                continue
            over |= {found.marker.name: found.entry.bytes} if done else {}
    if over:
        store.sync_folder()  # or a loss of power may bring files back without their marker
        _delete_made(store, over, "its name")


def remove_orphans(store: Store, entries: Iterable[Entry], *, now: float, stale_after_seconds: float) -> None:
    """Remove old temporary markers. `now` is on the storage's clock."""
    old = [entry for entry in entries if abs(now - entry.mtime) > stale_after_seconds]
    orphans = {entry.name: entry.bytes for entry in old if is_marker_temporary(entry.name)}
    if orphans:
        _delete_made(store, orphans, "its name")


def remove_own(store: Store, sizes: Mapping[str, int], errors: _Errors = None) -> list[str]:
    """Remove files of saves; returns the other files' names. Raises OSError, unless it fills `errors`."""
    kinds = {name: own.kind for name in sizes if (own := own_name(name)) is not None}
    left = {name for name in sizes if name not in kinds}
    remove = partial(_remove, store, left, errors)
    for kind in ("index", "data", "note"):
        files = [(name, sizes[name]) for name in kinds if kinds[name] == kind]
        streams = 1 if kind == "index" else min(_STREAMS, len(files) // _STREAM_FILES) or 1
        try:
            run_together([partial(remove, files[first::streams]) for first in range(streams)])
        except RuntimeError:  # the system allows no more threads
            remove(files, StopSignal())
    return sorted(left)


def _remove(store: Store, left: set[str], errors: _Errors, files: Iterable[tuple[str, int]], stop: StopSignal) -> None:
    for name, size in files:
        stop.check()
        try:
            if is_own_file(store, name, size):
                store.delete(name)
            else:
                left.add(name)
        except CheckpointNotFoundError:
            pass
        except (OSError, DcpError) as error:
            if errors is None:
                raise
            errors[name] = error


def _is_of(name: str, save_id: str) -> bool:
    own = own_name(name)
    return own is not None and own.save_id == save_id and (own.temporary or own.kind != "note")


def _is_own(name: str, marker: Marker, *, world_size: int) -> bool:
    """Whether the new checkpoint has a replaced file."""
    own = own_name(name)
    if own is not None and own.save_id == marker.save_id:
        return True
    if name == METADATA_NAME:
        return marker.rank is None
    parts = rank_index_name(name)
    return parts is not None and parts.save_id is None and marker.rank is not None and parts.rank < world_size


def _is_index_of(store: Store, name: str, save_id: str) -> bool:
    own = own_name(name)
    if own is None or own.kind != "index" or own.save_id is not None:
        return False
    try:
        info = read_index(store.read(name), file=name).info
    except DcpError:  # damaged, or gone
        return False
    return info is not None and info.save_id == save_id


def _delete_made(store: Store, sizes: Mapping[str, int], named_by: str) -> bool:
    errors: dict[str, Exception] = {}
    for name in remove_own(store, sizes, errors):
        _log.warning(
            "%r in %s stays, although %s names it: its name or contents are not those of a save's file; remove it if "
            "you do not need it",
            name,
            store.url,
            named_by,
        )
    for name, error in errors.items():
        _log.warning("could not remove %r from %s, the next save will try again: %s", name, store.url, error)
    return not errors


@dataclass(frozen=True, slots=True)
class Current:
    """State of a checkpoint's folder."""

    index: CheckpointIndex | None = None
    damage: DcpError | None = None
    """Raised by reading the index."""
    generation: int = 0
    """The checkpoint's, or the highest of readable indexes; 0 without any."""
    lack: str | None = None
    """Missing rank-local indexes, in words."""

    @property
    def exists(self) -> bool:
        """Whether there is a checkpoint, readable or not."""
        return self.index is not None or self.damage is not None

    @property
    def save_id(self) -> str | None:
        """None without a checkpoint, or if stock wrote it."""
        return self.index.info.save_id if self.index is not None and self.index.info is not None else None


def read_current(
    store: Store, entries: list[Entry] | None = None, load: Callable[[Entry], CheckpointIndex] | None = None
) -> Current:
    """Read the newest complete checkpoint's index; an unreadable index is returned as `damage`.

    `entries` is a fresh listing, `load` reads an index file. Raises OSError if the folder's state is unknown.
    """
    try:
        index = current_index(store, entries, load)
    except CheckpointNotFoundError as error:
        return Current(lack=str(error))
    except (CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError) as error:
        names = (entry.name for entry in store.list() if is_index_name(entry.name))
        return Current(None, error, _highest_generation(store, names))
    if index is None:
        return Current()
    return Current(index, None, index.info.generation if index.info is not None else 0)


def index_digest(store: Store, names: Iterable[str]) -> str:
    """Return a digest of the index files in `names`, which identifies their save; `""` without any. Raises OSError."""
    indexes = sorted(filter(is_index_name, names))
    digest = hashlib.blake2b(digest_size=16)
    for name in indexes:
        digest.update(f"{name}\n".encode())
        with contextlib.suppress(CheckpointNotFoundError):
            digest.update(store.read(name))
    return digest.hexdigest() if indexes else ""


def _highest_generation(store: Store, names: Iterable[str]) -> int:
    """A new save must look newer than any readable index."""
    highest = 0
    for name in names:
        with contextlib.suppress(DcpError):
            info = read_index(store.read(name), file=name).info
            highest = max(highest, info.generation if info is not None else 0)
    return highest
