"""Removal of checkpoints by `rm` and `prune`, with safety checks."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from dcp_base import DcpError
from dcp_base.schemes import WEB_SCHEMES, scheme_of
from dcp_inspect.printing.output import age
from dcp_inspect.printing.suggestions import hint
from dcp_io import STALE_AFTER_SECONDS, SaveInProgressError, StorageError, Store, StoreBackend, remove_checkpoint
from dcp_io.checkpoints.drop_parts import SmallerCheckpoint
from dcp_io.checkpoints.list_checkpoints import running_saves
from dcp_io.checkpoints.remove_checkpoint import ReadingSign, checkpoint_files
from dcp_manifest import CheckpointNotFoundError, FoundCheckpoint
from dcp_manifest.folders.folder import DATA_SUFFIX, METADATA_NAME, REMOVING, SAVE_MARKER_PREFIX, is_index_name


@dataclass(frozen=True, slots=True)
class Removal:
    """A checkpoint's files in a folder."""

    path: str
    store: Store
    indexes: tuple[str, ...]
    files: tuple[str, ...]
    bytes: int
    others: tuple[str, ...]
    """Files that no save wrote: they stay."""
    force: bool
    """Whether to ignore running saves and readers."""
    refusal: str | None = None
    """In a dry run, why `force` is needed, if it is."""
    smaller: SmallerCheckpoint | None = None
    """What stays, if only parts are removed; then there are no files."""

    @property
    def what(self) -> str:
        """The path, and which parts of the checkpoint, if not all."""
        return self.path if self.smaller is None else f"{', '.join(self.smaller.parts) or 'nothing'} of {self.path}"


def plan_removal(path: str, store: Store, *, force: bool = False) -> Removal:
    """Return what would be removed; `path` is for messages.

    Raises:
        CheckpointNotFoundError: There is neither a checkpoint nor the remains of an unfinished save.
        SaveInProgressError: A process may use the folder, or a link points to it; not with `force`.
        CorruptCheckpointError: The index cannot be read; not with `force`.
    """
    _refuse_web(store, path)
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
    if not force and (links := FoundCheckpoint(store, 0.0).links()):
        text = f"a symbolic link points to {path}: {', '.join(links)}; remove the link, or use rm --force"
        raise SaveInProgressError(text)
    below = {name for name in named if name not in names and store.exists(name)}
    files = tuple(sorted(ours.keys() - {*indexes}))
    others = tuple(sorted((names | below) - ours.keys()))
    return Removal(path, store, indexes, files, sum(ours.values()), others, force)


def _check_unfinished(path: str, store: Store, ours: Collection[str], *, force: bool) -> None:
    data = [entry for entry in store.list() if entry.name in ours and entry.name.endswith(DATA_SUFFIX)]
    markers = any(name.startswith(SAVE_MARKER_PREFIX) for name in ours)
    if not data and not markers:
        raise CheckpointNotFoundError(f"there is no checkpoint in {path}: it has no {METADATA_NAME}")
    save = unfinished_save(store)
    if save.quiet is not None and not force:
        raise SaveInProgressError(
            f"{path} has no {METADATA_NAME}, and {save.reason}: wait until nothing has been written for {_PATIENCE}, "
            "or use rm --force"
        )


def plan_smaller(path: str, store: Store, *, keep: Collection[str] = (), drop: Collection[str] = ()) -> Removal:
    """Return the removal of parts of a checkpoint; see `SmallerCheckpoint`.

    Raises:
        CheckpointNotFoundError: The path has no checkpoint, no name matches a part, or nothing would stay.
        SaveInProgressError: A process may use the folder.
    """
    _refuse_web(store, path)
    _refuse_users(store, path, remedy="wait for it")  # --force would remove the whole checkpoint
    smaller = SmallerCheckpoint(store, keep=keep, drop=drop)
    if smaller.unknown:
        part = smaller.unknown[0]
        pieces = [name.split(".") for name in smaller.whole.names()]
        known = dict.fromkeys(".".join(each[:end]) for each in pieces for end in range(1, len(each) + 1))
        raise CheckpointNotFoundError(f"nothing in {path} is in the part {part!r}{hint(path, part, known)}")
    if smaller.is_empty:
        raise CheckpointNotFoundError(f"nothing would stay of {path}: `dcp rm {path}` removes the whole checkpoint")
    return Removal(path, store, (), (), smaller.bytes, (), force=False, smaller=smaller)


def _refuse_web(store: Store, path: str) -> None:
    if scheme_of(store.url) in WEB_SCHEMES:
        raise StorageError(f"{path}: checkpoints on web servers can be read, not removed")


def preview_removal(path: str, store: Store, *, force: bool = False) -> Removal:
    """Return what would be removed, with a refusal. Raises if `force` could not help."""
    if force:
        return plan_removal(path, store, force=True)
    try:
        return plan_removal(path, store)
    except DcpError as error:
        return replace(plan_removal(path, store, force=True), refusal=str(error))


def remove(removal: Removal) -> None:
    """Remove the files, and the folder if it is then empty, or only parts of the checkpoint.

    The safety checks run again, since a prompt takes time.
    """
    store = removal.store
    if removal.smaller is not None:
        removal.smaller.publish(by="the command dcp")
        return
    if not removal.force:
        again = plan_removal(removal.path, store)
        if (again.indexes, again.files) != (removal.indexes, removal.files):
            raise SaveInProgressError(f"{removal.path} has changed since you were asked: look at it, and try again")
    # Readers write their marker, then look for this one; we do the reverse, so at least one side sees the other.
    store.publish(REMOVING, b"", sync=False)  # empty, which is possible even on a full disk
    if not removal.force:
        try:
            _refuse_users(store, removal.path)
        except DcpError:
            store.delete(REMOVING)
            raise
    remove_checkpoint(store, also=frozenset({REMOVING}))


def _refuse_users(store: Store, path: str, remedy: str = "wait for it, or use rm --force") -> None:
    saves = running_saves(store, stale_after_seconds=STALE_AFTER_SECONDS)
    if saves:
        raise SaveInProgressError(f"a save is writing to {path} ({saves[0]}); {remedy}")
    readers = ReadingSign.alive(store, stale_after_seconds=STALE_AFTER_SECONDS)
    if readers:
        raise SaveInProgressError(f"a process is reading {path} ({readers[0]}); {remedy}")


_PATIENCE = age(STALE_AFTER_SECONDS)


@dataclass(frozen=True, slots=True)
class UnfinishedSave:
    """Running, perhaps running, or ended if both fields are None."""

    process: str | None
    """The live save and its process, from its marker."""
    quiet: str | None
    """Age of the newest file, if a save without a marker may run."""

    @property
    def reason(self) -> str | None:
        """Why `rm` refuses, if it does."""
        if self.process is not None:
            return f"a save is writing to it ({self.process})"
        if self.quiet is not None:
            return f"its newest file was written {self.quiet} ago, so a save may still be running"
        return None

    @property
    def summary(self) -> str:
        """The state and the command that removes the files."""
        if self.process is not None:
            return f"being saved: {self.process}"
        if self.quiet is None:
            return "unfinished: no .metadata, and no live save; `dcp rm` removes it"
        return (
            f"unfinished, or being saved: newest file written {self.quiet} ago; `dcp rm` removes it after {_PATIENCE} "
            "without a write, `dcp rm --force` at once"
        )

    def removal(self, path: str) -> str:
        """Return how to remove the files, for a sentence."""
        if self.reason is None:
            return f"`dcp rm {path}` removes what it left"
        when = "when the save has ended" if self.process else f"after {_PATIENCE} without a write"
        return f"`dcp rm {path}` removes what it left {when}, `dcp rm --force {path}` at once"


def unfinished_save(store: Store) -> UnfinishedSave:
    """Return the state of the save in a folder without an index.

    A save without a marker, as PyTorch's, may be running until nothing was written for `STALE_AFTER_SECONDS`.
    """
    running = running_saves(store, stale_after_seconds=STALE_AFTER_SECONDS)
    if running:
        return UnfinishedSave(running[0], None)
    entries = store.list()
    if any(entry.name.startswith(SAVE_MARKER_PREFIX) for entry in entries):  # of processes that have ended
        return UnfinishedSave(None, None)
    written = max((entry.mtime for entry in entries if entry.name.endswith(DATA_SUFFIX)), default=0.0)
    quiet_seconds = time.time() - written
    return UnfinishedSave(None, age(quiet_seconds) if quiet_seconds < STALE_AFTER_SECONDS else None)
