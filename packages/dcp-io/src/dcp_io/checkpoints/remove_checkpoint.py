"""Removal of checkpoints, and of leftovers of dead saves. Files that no save made are kept."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Collection

from dcp_base.errors import DcpError
from dcp_io.saves.cleanup import read_current, remove_dead_saves, remove_own
from dcp_io.saves.save_files import (
    ProcessIdentity,
    Renewal,
    can_be_checked,
    find_markers,
    is_own_file,
    own_name,
    this_process,
)
from dcp_io.stores.store import Entry, Store, SupportsFolders
from dcp_manifest.errors import CheckpointNotFoundError
from dcp_manifest.folders.folder import is_index_name


def checkpoint_files(store: Store, named: Collection[str] = ()) -> dict[str, int]:
    """Return name → size of the files that `remove_checkpoint` would remove, in this order. Raises OSError.

    `named` are the index's data files.
    """
    sizes = _in_order(store, named)
    return {name: size for name, size in sizes.items() if is_index_name(name) or _is_there(store, name, size)}


def remove_checkpoint(store: Store, *, also: frozenset[str] = frozenset()) -> list[str]:
    """Remove a checkpoint and leftovers of saves from its folder; returns the names of the remaining files.

    The index is removed first, then the files that are a save's by name and first bytes, and then those in `also`,
    whatever their contents. After an interruption no loadable checkpoint is left, and a second call completes the
    removal. No process may be saving to the folder, which may be missing.

    Raises OSError if the storage failed.

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
    if not left and isinstance(store, SupportsFolders):
        store.remove_folder()
    return sorted(left)


def clear_dead_saves(store: Store, *, stale_after_seconds: float) -> None:
    """Remove leftovers of dead saves from a folder. Raises OSError."""
    entries = store.list()
    found, now = find_markers(store, entries), time.time()
    alive = {
        each.marker.save_id for each in found if not each.is_dead(now=now, stale_after_seconds=stale_after_seconds)
    }
    over = [each for each in found if each.marker.save_id not in alive]  # other ranks of the same save may be alive
    if over:
        remove_dead_saves(store, over, read_current(store, entries), entries)


def _in_order(store: Store, named: Collection[str]) -> dict[str, int]:
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
    """None if the file is missing, or a link out of the folder."""
    try:
        return store.size(name) if "/" in name else None
    except DcpError as error:
        if isinstance(error, OSError) and not isinstance(error, CheckpointNotFoundError):
            raise
        return None


READING_PREFIX = ".dcp-reading-"
_MAX_BYTES = 1 << 16


class ReadingSign:
    """Lease of this process on a checkpoint, as a context manager: a file that is renewed until the block ends.

    Entering the block raises OSError if the lease cannot be written. Other hosts consider the reader dead after
    `stale_after_seconds` without renewal.
    """

    @staticmethod
    def alive(store: Store, *, stale_after_seconds: float) -> list[str]:
        """Return the file names of leases with a reader that may be alive."""
        signs = [entry for entry in store.list() if entry.name.startswith(READING_PREFIX)]
        return [
            entry.name for entry in signs if not is_dead_sign(store, entry, stale_after_seconds=stale_after_seconds)
        ]

    def __init__(self, store: Store, *, stale_after_seconds: float) -> None:
        self.name = f"{READING_PREFIX}{secrets.token_hex(6)}"
        self._store = store
        self._renewal = Renewal(store, self.name, stale_after_seconds)

    def __enter__(self) -> ReadingSign:
        self._store.publish(self.name, json.dumps(this_process().to_dict()).encode(), sync=False)
        self._renewal.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._renewal.stop()
        with contextlib.suppress(OSError, DcpError):
            self._store.delete(self.name)


def is_dead_sign(store: Store, entry: Entry, *, stale_after_seconds: float) -> bool:
    """Whether a reader's lease is gone, or its process dead; on another host, if old or dated far in the future.

    Raises OSError.
    """
    data = b""
    try:
        if entry.bytes <= _MAX_BYTES:
            data = store.read(entry.name)
    except CheckpointNotFoundError:
        return True
    except DcpError as error:
        if isinstance(error, OSError):
            raise
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        process = ProcessIdentity.from_dict(json.loads(data))
        if can_be_checked(process):
            return process.is_gone()
    return abs(time.time() - entry.mtime) > stale_after_seconds
