"""Removing a checkpoint so that it never looks valid while half of it is gone: first its index, then its files."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from dcp_io import LocalStore, SaveInProgressError
from dcp_manifest import METADATA_NAME, CheckpointNotFoundError, DcpError, index_of, needed_bytes

__all__ = ["Removal", "plan_removal", "remove"]

_MARKER = ".dcp-save-"
_STALE_SECONDS = 3600.0
_RANK_INDEXES = "__*.metadata"


@dataclass(frozen=True, slots=True)
class Removal:
    """What of a folder belongs to its checkpoint."""

    path: Path
    indexes: tuple[str, ...]
    files: tuple[str, ...]
    bytes: int
    others: tuple[str, ...]
    """Files that stay, because no index names them."""


def plan_removal(path: Path, *, force: bool = False) -> Removal:
    """What would be removed.

    Args:
        path: A checkpoint's folder.
        force: Also where the index cannot be read (then all files with names of data files), or a save seems to run.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        SaveInProgressError: A save is, or lately was, writing there.
        CorruptCheckpointError, …: The index cannot be read.
    """
    if not path.is_dir():
        raise CheckpointNotFoundError(f"there is no folder {path}: check the path")
    live = [each for each in path.glob(f"{_MARKER}*") if time.time() - each.stat().st_mtime < _STALE_SECONDS]
    if live and not force:
        raise SaveInProgressError(f"a save is writing to {path} ({live[0].name}); wait for it, or use --force")
    indexes = sorted({each.name for pattern in (METADATA_NAME, _RANK_INDEXES) for each in path.glob(pattern)})
    if not indexes:
        raise CheckpointNotFoundError(f"there is no checkpoint in {path}: it has no {METADATA_NAME}")
    try:
        files = set(needed_bytes(index_of(path)))
    except DcpError:
        if not force:
            raise
        files = set()
    found = {each.name for each in path.glob("__*.distcp")} if force else set()
    present = sorted(name for name in files | found if (path / name).is_file())
    markers = [each.name for each in path.glob(f"{_MARKER}*")] if force else []
    sizes = sum((path / name).stat().st_size for name in (*indexes, *present))
    mine = {*indexes, *present, *markers}
    others = tuple(sorted(each.name for each in path.iterdir() if each.name not in mine))
    return Removal(path, tuple(indexes), (*present, *markers), sizes, others)


def remove(removal: Removal) -> None:
    """Remove it, and the folder if nothing else is in it."""
    store = LocalStore(removal.path)
    for name in removal.indexes:
        store.delete(name)
    store.sync_folder()
    for name in removal.files:
        store.delete(name)
    with contextlib.suppress(OSError):
        removal.path.rmdir()
