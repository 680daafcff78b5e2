"""Search for the newest loadable checkpoint below a folder, and the check of a single checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dcp_io.checkpoints.list_checkpoints import find_checkpoints
from dcp_io.checkpoints.verify_checkpoint import verify_checkpoint
from dcp_io.saves.current_checkpoint import read_current
from dcp_io.stores.root import Root
from dcp_io.stores.store import Entry, Store
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_manifest.folders.find_checkpoints import FoundCheckpoint, check_files, first_valid

__all__ = ["check_checkpoint", "latest_valid"]


def check_checkpoint(store: Store, *, deep: bool = False, entries: Sequence[Entry] | None = None) -> None:
    """Check that the checkpoint in a folder can be loaded, as far as its index and the lengths of its files show.

    Args:
        store: The checkpoint's folder.
        deep: Whether to read all data files as well, and check every CRC.
        entries: The folder's listing, if the caller already has it; None lists the folder.

    Raises:
        CheckpointNotFoundError: There is no complete index, or a data file is missing; the message names it.
        CorruptCheckpointError: The index is damaged, a file is too short, or `deep` found damage; the message says
            where.
        UnsafeCheckpointError, UnsupportedFormatError: The index is refused: hostile, or of an unknown format.
        StorageError, OSError: The storage failed.

    Ranks: one; not collective.
    """
    current = read_current(store, None if entries is None else list(entries))
    if current.damage is not None:
        raise current.damage
    if current.index is None:
        raise CheckpointNotFoundError(f"there is no checkpoint in {store.url}: it has no complete index")
    check_files(store, current.index)
    if deep:
        problems = verify_checkpoint(store).problems
        if problems:
            first = problems[0]
            raise CorruptCheckpointError(
                f"the checkpoint in {store.url} is damaged in {len(problems)} places; the first: {first.message}",
                file=first.file,
                key=first.key,
                offset=first.offset,
            )


def latest_valid(root: Root | Store | str | os.PathLike[str], *, deep: bool = False) -> FoundCheckpoint[Store] | None:
    """Return the newest valid checkpoint of a root or its subfolders: the first that passes `check_checkpoint`.

    Checkpoints are tried in the order of `find_checkpoints`: within a training run, the highest step is the newest;
    modification times do not count, since copying changes them. Leftovers of a crash and quarantined checkpoints are
    skipped.

    Args:
        root: A path, a URI that an installed storage handles, a store, or a `Root`. The folder may be missing.
        deep: Whether to read the data as well, and check every CRC, which takes as long as loading. Otherwise only the
            index, and the existence and lengths of files, are checked.

    Returns:
        The newest valid checkpoint; None if no checkpoint is valid.

    Raises:
        StorageError, OSError: The storage failed while the folders were listed.

    Ranks: one; not collective.
    """
    return first_valid(find_checkpoints(root), lambda found: check_checkpoint(found.store, deep=deep))
