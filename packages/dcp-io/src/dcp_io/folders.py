"""Checkpoints below a folder of any store: which there are, whether their files are all there, who is writing.

The same for the local file system alone, without stores, is in `dcp_manifest.discover`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dcp_io.local import LocalStore
from dcp_io.markers import find_markers
from dcp_io.store import Store
from dcp_manifest.columns import CheckpointIndex
from dcp_manifest.discover import is_index_name, needed_bytes
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError

__all__ = ["FoundCheckpoint", "check_files", "find_checkpoints", "running_saves"]


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A folder that has an index; whether it can be read is another question."""

    store: Store
    modified_seconds: float
    """Of the youngest index, seconds since the epoch on the storage's clock."""

    @property
    def path(self) -> Path:
        """The folder. Raises TypeError if it is none of the file system; its `store.url` says where it is."""
        if not isinstance(self.store, LocalStore):
            raise TypeError(f"{self.store.url} is no folder of the file system: use .store, or .store.url as an id")
        return Path(self.store.path)


def find_checkpoints(root: Store) -> Iterator[FoundCheckpoint]:
    """The checkpoints in a folder and in those below it, in the order of their names; nothing is read.

    Args:
        root: May be missing.

    Raises:
        StorageError, OSError: The storage failed.
    """
    times = [entry.mtime for entry in root.list() if is_index_name(entry.name)]
    if times:
        yield FoundCheckpoint(root, max(times))
    for name in root.folders():
        yield from find_checkpoints(root.child(name))


def check_files(store: Store, index: CheckpointIndex) -> None:
    """Make sure that the data files of a checkpoint are there and long enough; their contents are not read.

    Raises:
        CheckpointNotFoundError: One is missing; names it.
        CorruptCheckpointError: One is too short; names it.
    """
    sizes = {entry.name: entry.bytes for entry in store.list()}
    for name, wanted in needed_bytes(index).items():
        size = sizes[name] if name in sizes else store.size(name)
        if size < wanted:
            raise CorruptCheckpointError(
                f"the data file in {store.url} has {size} bytes and the index needs {wanted}",
                file=name,
            )


def running_saves(store: Store, *, stale_after_seconds: float) -> list[str]:
    """Who is saving to a folder, or cannot be proven dead, in words; empty if nobody is.

    Args:
        store: The checkpoint's folder.
        stale_after_seconds: After so long without a sign of life a save of another host counts as dead.
    """
    now = time.time()
    try:
        found = find_markers(store, store.list())
    except CheckpointNotFoundError:
        return []
    return [each.describe(now) for each in found if not each.is_dead(now=now, stale_after_seconds=stale_after_seconds)]
