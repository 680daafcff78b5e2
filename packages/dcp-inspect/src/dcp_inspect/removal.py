"""Removal of checkpoints by `rm` and `prune`, with safety checks; `dcp_io` removes the index, then the files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from dcp_hooks import WEB_SCHEMES
from dcp_inspect.errors import CheckpointInUseError
from dcp_inspect.unfinished import PATIENCE, unfinished_save
from dcp_io import (
    REMOVING,
    STALE_AFTER_SECONDS,
    SaveInProgressError,
    StorageError,
    Store,
    StoreBackend,
    announce_removal,
    checkpoint_files,
    live_readers,
    remove_checkpoint,
    running_saves,
    scheme_of,
)
from dcp_manifest import (
    DATA_SUFFIX,
    METADATA_NAME,
    SAVE_MARKER_PREFIX,
    CheckpointNotFoundError,
    DcpError,
    is_index_name,
)

__all__ = ["Removal", "plan_removal", "preview_removal", "remove"]


@dataclass(frozen=True, slots=True)
class Removal:
    """The files of a folder that belong to its checkpoint."""

    path: str
    """Path of the folder, as the user gave it."""
    store: Store
    indexes: tuple[str, ...]
    files: tuple[str, ...]
    bytes: int
    others: tuple[str, ...]
    """Files that are kept, because no save has made them."""
    force: bool
    """Whether the removal ignores running saves and readers."""
    refusal: str | None = None
    """In a dry run, why the removal would be refused without `force`; None if it would not."""


def plan_removal(path: str, store: Store, *, force: bool = False) -> Removal:
    """Return what would be removed.

    Args:
        path: Path of the folder, for messages.
        store: Store of the folder.
        force: Whether to remove even if the index cannot be read, or a process seems to save or read there.

    Raises:
        CheckpointNotFoundError: There is neither a checkpoint, nor anything that an unfinished save left.
        SaveInProgressError: A process that runs, or may still run, saves to the folder.
        CheckpointInUseError: A process that runs, or may still run, reads the checkpoint.
        CorruptCheckpointError, …: The index cannot be read.
        StorageError: The checkpoint is on a web server, which does not allow removal.
    """
    if scheme_of(store.url) in WEB_SCHEMES:
        raise StorageError(f"{path}: checkpoints on web servers can be read, not removed")
    if not force:
        _refuse_users(store, path)
    names = {entry.name for entry in store.list()}
    indexes = tuple(sorted(name for name in names if is_index_name(name)))
    try:
        named: tuple[str, ...] = StoreBackend(store).read_index().files if indexes else ()
    except DcpError:
        if not force:
            raise
        named = ()
    ours = checkpoint_files(store, named)
    if not indexes:
        _check_unfinished(path, store, ours, force=force)
    below = {name for name in named if name not in names and store.exists(name)}
    files = tuple(sorted(ours.keys() - {*indexes}))
    others = tuple(sorted((names | below) - ours.keys()))
    return Removal(path, store, indexes, files, sum(ours.values()), others, force)


def _check_unfinished(path: str, store: Store, ours: Collection[str], *, force: bool) -> None:
    """Refuse a folder without an index that holds no files of a save, or perhaps those of a running one."""
    data = [entry for entry in store.list() if entry.name in ours and entry.name.endswith(DATA_SUFFIX)]
    markers = any(name.startswith(SAVE_MARKER_PREFIX) for name in ours)
    if not data and not markers:
        raise CheckpointNotFoundError(f"there is no checkpoint in {path}: it has no {METADATA_NAME}")
    save = unfinished_save(store)
    if save.quiet is not None and not force:
        raise SaveInProgressError(
            f"{path} has no {METADATA_NAME}, and {save.reason}: wait until nothing has been written for {PATIENCE}, or "
            "use rm --force"
        )


def preview_removal(path: str, store: Store, *, force: bool = False) -> Removal:
    """Return what would be removed, for a dry run: a refusal is noted in the result. Arguments: see `plan_removal`.

    Raises:
        CheckpointNotFoundError, StorageError: As `plan_removal`: there is nothing that `force` would remove.
    """
    if force:
        return plan_removal(path, store, force=True)
    try:
        return plan_removal(path, store)
    except DcpError as error:
        return replace(plan_removal(path, store, force=True), refusal=str(error))


def remove(removal: Removal) -> None:
    """Remove the files, and the folder if it is then empty; repeats the safety checks, since a prompt takes time.

    Raises:
        SaveInProgressError, CheckpointInUseError: Since `plan_removal`, a process began to use the checkpoint, or
            another checkpoint has replaced it.
    """
    store = removal.store
    if not removal.force:
        again = plan_removal(removal.path, store)
        if (again.indexes, again.files) != (removal.indexes, removal.files):
            raise CheckpointInUseError(f"{removal.path} has changed since you were asked: look at it, and try again")
    # Readers look for this when they have left their sign, and we for signs when we have left this: one sees the other.
    announce_removal(store)
    if not removal.force:
        try:
            _refuse_users(store, removal.path)
        except DcpError:
            store.delete(REMOVING)
            raise
    remove_checkpoint(store, also=frozenset({REMOVING}))


def _refuse_users(store: Store, path: str) -> None:
    saves = running_saves(store, stale_after_seconds=STALE_AFTER_SECONDS)
    if saves:
        raise SaveInProgressError(f"a save is writing to {path} ({saves[0]}); wait for it, or use rm --force")
    readers = live_readers(store, stale_after_seconds=STALE_AFTER_SECONDS)
    if readers:
        raise CheckpointInUseError(f"a process is reading {path} ({readers[0]}); wait for it, or use rm --force")
