"""The current checkpoint of a folder: its index, save id and generation, read through a store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from dcp_io.stores.store import Entry, Store
from dcp_manifest.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
)
from dcp_manifest.file.manifest import read_index
from dcp_manifest.folders.file_names import is_index_name
from dcp_manifest.folders.find_checkpoints import current_index
from dcp_manifest.index.columns import CheckpointIndex

__all__ = ["Current", "read_current"]


@dataclass(frozen=True, slots=True)
class Current:
    """State of a checkpoint's folder: the index can be read, is missing, or cannot be read."""

    index: CheckpointIndex | None = None
    damage: DcpError | None = None
    """The error that reading the index raised; None if the index can be read or is missing."""
    generation: int = 0
    """Generation of the checkpoint, or else the highest generation of the readable indexes; 0 without any."""
    lack: str | None = None
    """Description of the missing indexes, if the existing rank-local indexes do not make a complete checkpoint."""

    @property
    def exists(self) -> bool:
        """Whether the folder has a checkpoint, readable or not."""
        return self.index is not None or self.damage is not None

    @property
    def save_id(self) -> str | None:
        """Save id of the checkpoint; None if there is no checkpoint or stock wrote it."""
        return self.index.info.save_id if self.index is not None and self.index.info is not None else None


def read_current(store: Store, entries: list[Entry] | None = None) -> Current:
    """Read the index of the newest complete checkpoint in the store; an unreadable index is returned as `damage`.

    Args:
        store: The checkpoint's folder.
        entries: The folder's listing, if the caller has a fresh one; None lists the folder.

    Raises:
        OSError: The storage failed, so the state of the folder is unknown.
    """
    try:
        index = current_index(store, entries)
    except CheckpointNotFoundError as error:
        return Current(lack=str(error))
    except (CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError) as error:
        names = (entry.name for entry in store.list() if is_index_name(entry.name))
        return Current(None, error, _highest_generation(store, names))
    if index is None:
        return Current()
    return Current(index, None, index.info.generation if index.info is not None else 0)


def _highest_generation(store: Store, names: Iterable[str]) -> int:
    """Return the highest generation of all readable indexes: a new save must not look older than any of them."""
    highest = 0
    for name in names:
        with contextlib.suppress(DcpError):
            info = read_index(store.read(name), file=name).info
            highest = max(highest, info.generation if info is not None else 0)
    return highest
