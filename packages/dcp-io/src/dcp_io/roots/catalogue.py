"""Catalogue of the checkpoints under one root, over any store: listing, checking, quarantine and removal.

Each checkpoint is a folder `step-<n>`, or with another prefix. Besides the checkpoint's own files the folder may
contain `.dcp-note.json` (note with metrics and the saving process), `.dcp-note-next.json` (note of a save that has not
yet replaced the checkpoint), `.dcp-quarantined.json` (the checkpoint is damaged), `.dcp-reading-<id>` (lease of a
process that reads the checkpoint) and `.dcp-removing` (the checkpoint will be removed).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from dcp_io.checkpoints.list_checkpoints import running_saves
from dcp_io.checkpoints.newest_checkpoint import check_checkpoint
from dcp_io.checkpoints.reader_leases import (
    READING_PREFIX,
    REMOVING,
    ReadingSign,
    announce_removal,
    is_dead_sign,
    live_readers,
)
from dcp_io.checkpoints.remove_checkpoint import clear_dead_saves, remove_checkpoint
from dcp_io.roots.read_notes import read_if_allowed, read_if_there, read_note
from dcp_io.roots.records import CheckpointRecord, Note
from dcp_io.roots.unfinished import Unfinished, describe_unfinished, ended_journals
from dcp_io.saves.cleanup import remove_own
from dcp_io.saves.marker_owner import is_gone, this_process
from dcp_io.saves.own_files import temporary_of
from dcp_io.stores.store import Entry, Store
from dcp_manifest.errors import CheckpointNotFoundError
from dcp_manifest.folders.checkpoint_order import step_of
from dcp_manifest.folders.file_names import METADATA_NAME, is_index_name
from dcp_manifest.folders.folder_notes import NOTE, QUARANTINE, put_aside_reason, quarantine_reason
from dcp_manifest.logs import library_logger

__all__ = ["Catalogue", "StepFolder"]

_log = library_logger(__name__)

LATEST = "latest"
# The others are of the tiers of a run, to which this root may belong: their description, and the name of this host.
_ROOT_FILES = (LATEST, "run.tiers.toml", ".dcp-host", ".dcp-hosts.json")
NEXT_NOTE = ".dcp-note-next.json"
# Publishing a few bytes is over, or its process dead, after so long.
_PUBLISHING_SECONDS = 5.0
# Between checkpoints made one after the other by hosts whose clocks differ.
_TICK_SECONDS = 0.001
# Of the markers of running saves, and of the notes of promoters between tiers and of copies on other hosts.
_SAVING, _PROMOTED, _COPIES = ".dcp-save-", (".dcp-promot", ".dcp-forgone-", ".dcp-refused-"), ".dcp-copies"


@dataclass(frozen=True, slots=True)
class StepFolder:
    """Listing of one checkpoint folder under the root."""

    step: int
    store: Store
    entries: tuple[Entry, ...]

    @property
    def names(self) -> frozenset[str]:
        """Names of all objects in the folder."""
        return frozenset(entry.name for entry in self.entries)

    @property
    def is_good(self) -> bool:
        """Whether the folder holds a checkpoint that is not known to be damaged."""
        return self.is_checkpoint and put_aside_reason(self.names) is None

    @property
    def is_checkpoint(self) -> bool:
        """Whether the folder has an index and is not marked for removal."""
        names = self.names
        return REMOVING not in names and any(map(is_index_name, names))


class Catalogue:
    """Catalogue of the checkpoints under a root.

    Args:
        root: The folder above all checkpoints.
        stale_after_seconds: A process on another host counts as dead when it has not renewed its save marker or lease
            for this long.
        folder_prefix: Prefix of the names of checkpoint folders, before the step.

    Raises:
        ValueError: The step cannot be parsed from folder names with this prefix.

    Ranks: the coordinator; no method is collective.

    Example:
        ```python
        import dcp_all as dcp
        from dcp_io import Catalogue, LocalStore

        dcp.save({"step": 40}, checkpoint_id="run/step-40")
        catalogue = Catalogue(LocalStore("run"), stale_after_seconds=600)
        assert [record.step for record in catalogue.records()] == [40]
        catalogue.quarantine(40, "the loss is NaN")
        assert catalogue.highest() is None
        ```
    """

    def __init__(self, root: Store, *, stale_after_seconds: float, folder_prefix: str = "step-") -> None:
        if "/" in folder_prefix or step_of(f"{folder_prefix}10") != 10:
            raise ValueError(
                f"folder_prefix is {folder_prefix!r}: no tool would read step 10 from {folder_prefix + '10'!r}; choose "
                "one like 'step-' or 'checkpoint-'"
            )
        self._prefix = folder_prefix
        self._root = root
        self._stale_after_seconds = stale_after_seconds
        self._notes: dict[int, tuple[Entry, Note | None]] = {}
        """Cache: step → entry of the note in the listing, and the note that was read."""

    @property
    def store(self) -> Store:
        """The root."""
        return self._root

    def folder_name(self, step: int) -> str:
        """Return the name of a checkpoint's folder in the root."""
        return f"{self._prefix}{step}"

    def store_of(self, step: int) -> Store:
        """Return the store of a step's folder, which need not exist."""
        return self._root.child(self.folder_name(step))

    def folders(self) -> list[StepFolder]:
        """Return all checkpoint folders by ascending step: complete, damaged, unpublished or half removed.

        Folders that this user may not read are left out, with a warning.
        """
        return [folder for step in self._steps() if (folder := self._folder_if_allowed(step)) is not None]

    def _folder_if_allowed(self, step: int) -> StepFolder | None:
        try:
            return self._folder(step)
        except PermissionError as error:
            _log.warning("step %d is left out, which may not be read: %s", step, error)
            return None

    def _steps(self) -> list[int]:
        """Return the steps that have a folder, ascending. Other names, such as `step-02`, are ignored."""
        found = ((name, step_of(name)) for name in self._root.folders())
        return sorted(step for name, step in found if step is not None and name == self.folder_name(step))

    def _folder(self, step: int) -> StepFolder:
        store = self.store_of(step)
        return StepFolder(step, store, tuple(store.list()))

    def highest(self) -> CheckpointRecord | None:
        """Return the checkpoint with the highest step of those not known to be damaged; None if there is none."""
        folders = map(self._folder_if_allowed, reversed(self._steps()))
        return next((self._record(folder) for folder in folders if folder is not None and folder.is_good), None)

    def is_good(self, step: int) -> bool:
        """Whether a step has a checkpoint that is not known to be damaged."""
        return self._folder(step).is_good

    def has_checkpoint(self, step: int) -> bool:
        """Whether a step has a checkpoint, damaged or not, that is not marked for removal."""
        return self._folder(step).is_checkpoint

    def records(self, folders: Collection[StepFolder] | None = None) -> list[CheckpointRecord]:
        """Return the records of checkpoints by ascending step, including quarantined checkpoints; no index is read.

        Args:
            folders: Result of `folders()`, if the caller has a fresh one; None lists the folders.
        """
        listed = self.folders() if folders is None else folders
        steps = {folder.step for folder in listed}
        for step in set(self._notes) - steps:  # whole steps: a save in the background may end meanwhile
            self._notes.pop(step, None)
        return [self._record(folder) for folder in listed if folder.is_checkpoint]

    def unfinished(self, above: int) -> list[Unfinished]:
        """Return what there is of saves and copies without an index, of steps above one, the highest first."""
        found = []
        for step in reversed([step for step in self._steps() if step > above]):
            folder = self._folder(step)
            if not folder.is_checkpoint and REMOVING not in folder.names:
                stale = self._stale_after_seconds
                found.append(describe_unfinished(step, folder.store, folder.entries, stale_after_seconds=stale))
        return [one for one in found if one is not None]

    def _record(self, folder: StepFolder) -> CheckpointRecord:
        note = self._note(folder)
        created = max((entry.mtime for entry in folder.entries if is_index_name(entry.name)), default=0.0)
        reason = None
        if QUARANTINE in folder.names:
            reason = quarantine_reason(read_if_allowed(folder.store, QUARANTINE) or b"")
        if note is None:
            return CheckpointRecord(folder.step, created, quarantined=reason)
        return CheckpointRecord(folder.step, note.created_seconds, note.metrics, reason)

    def _note(self, folder: StepFolder) -> Note | None:
        """Return the note in a folder; cached until the note's entry in the listing changes."""
        entry = next((entry for entry in folder.entries if entry.name == NOTE), None)
        if entry is None:
            return None
        known = self._notes.get(folder.step)
        if known is None or known[0] != entry:
            note = Note.from_bytes(read_if_allowed(folder.store, NOTE) or b"")
            known = self._notes[folder.step] = (entry, note)
        return known[1]

    def check(self, step: int) -> None:
        """Check that a checkpoint is loadable, as far as its index and file sizes show.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError: The
                checkpoint is not loadable.
            OSError: The storage failed.
        """
        folder = self._folder(step)
        check_checkpoint(folder.store, entries=folder.entries)

    def prepare(self, step: int, metrics: Mapping[str, float], *, after: CheckpointRecord | None = None) -> None:
        """Write the note of the save that this process is about to begin.

        A damaged checkpoint of the same step is removed first. An undamaged checkpoint keeps its note until `published`
        is called for the save that replaces it.

        Args:
            step: The step to be saved.
            metrics: Metrics of the save, by name.
            after: An existing checkpoint: the creation time in the note is later than that of `after`, even if this
                host's clock is behind. None uses the clock alone.
        """
        folder = self._folder(step)
        if QUARANTINE in folder.names or REMOVING in folder.names:
            self._remove(folder)
            folder = self._folder(step)
        folder.store.make()
        seconds = time.time() if after is None else max(time.time(), after.created_seconds + _TICK_SECONDS)
        note = Note.now(step, seconds, metrics, _index_digest(folder))
        self._write_note(folder, NEXT_NOTE if folder.is_checkpoint else NOTE, note.to_bytes())

    def _write_note(self, folder: StepFolder, name: str, data: bytes) -> None:
        self._notes.pop(folder.step, None)
        folder.store.publish(name, data, sync=False)

    def published(self, step: int) -> None:
        """Write a step's folder name to the root's file `latest`; its checkpoint must be durable.

        If `prepare` wrote a second note, because the save replaced a checkpoint, that note becomes the step's note.
        """
        self._root.publish(LATEST, f"{self.folder_name(step)}\n".encode())
        self._promote(self._folder(step))

    def failed(self, step: int) -> None:
        """Remove the note of a failed save of the step, if the save was to replace a checkpoint."""
        self.store_of(step).delete(NEXT_NOTE)

    def _promote(self, folder: StepFolder) -> None:
        data = read_if_there(folder.store, NEXT_NOTE) if NEXT_NOTE in folder.names else None
        if data is not None:
            self._write_note(folder, NOTE, data)
            folder.store.delete(NEXT_NOTE)

    def quarantine(self, step: int, reason: str) -> None:
        """Quarantine a damaged checkpoint: write a file with the reason, which makes readers skip the checkpoint."""
        data = json.dumps({"reason": reason, "found": time.time()}, indent=1).encode()
        self.store_of(step).publish(QUARANTINE, data)

    @contextlib.contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Context manager that holds a reader's lease on a checkpoint, which prevents its removal.

        Raises:
            CheckpointNotFoundError: The checkpoint is missing or being removed.
        """
        store = self.store_of(step)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(ReadingSign(store, stale_after_seconds=self._stale_after_seconds))
            except OSError as error:  # a full disk, or a root that may only be read, must not prevent reading
                _log.warning("%s is read without a sign that keeps it from being removed: %s", store.url, error)
            else:
                if store.exists(REMOVING):
                    raise CheckpointNotFoundError(f"{store.url} is being removed; choose another checkpoint")
            yield

    def remove(self, step: int) -> bool:
        """Remove a checkpoint unless a process reads it or saves to it; returns whether it was removed."""
        folder = self._folder(step)
        if running_saves(folder.store, stale_after_seconds=self._stale_after_seconds):
            return False
        announce_removal(folder.store)
        if self._has_readers(folder.store):
            folder.store.delete(REMOVING)
            return False
        return self._remove(self._folder(step))

    def sweep(self, folders: Collection[StepFolder] | None = None, *, running: Collection[int] = ()) -> list[int]:
        """Remove leftovers of killed saves and of interrupted removals; returns the steps whose folders were removed.

        Args:
            folders: Result of `folders()`, if the caller has a fresh one; None lists the folders.
            running: Steps that this process is saving.
        """
        self._remove_temporaries(self._root, self._root.list(), _ROOT_FILES)
        listed = self.folders() if folders is None else folders
        return [folder.step for folder in listed if folder.step not in running and self._sweep_if_allowed(folder)]

    def _sweep_if_allowed(self, folder: StepFolder) -> bool:
        """Sweep a folder; one with files that this user may not read, or remove, stays as it is."""
        try:
            return self._sweep(folder)
        except PermissionError as error:
            _log.warning("leftovers in %s stay: %s", folder.store.url, error)
            return False

    def _sweep(self, folder: StepFolder) -> bool:
        if folder.is_checkpoint:
            self._tidy(folder)
            return False
        folder = self._folder(folder.step)  # a save may have begun, or ended, since it was listed
        if REMOVING in folder.names:
            return not self._has_readers(folder.store) and self._remove(folder)
        return not folder.is_checkpoint and not self._is_being_saved(folder) and self._remove(folder)

    def _tidy(self, folder: StepFolder) -> None:
        """Remove leftovers of killed saves and readers beside a checkpoint."""
        if any(name.startswith(_SAVING) for name in folder.names):
            clear_dead_saves(folder.store, stale_after_seconds=self._stale_after_seconds)
        leases = [entry for entry in folder.entries if entry.name.startswith(READING_PREFIX)]
        dead = [
            entry
            for entry in leases
            if is_dead_sign(folder.store, entry, stale_after_seconds=self._stale_after_seconds)
        ]
        remove_own(folder.store, {entry.name: entry.bytes for entry in dead})
        ended = ended_journals(folder.store, folder.entries, stale_after_seconds=self._stale_after_seconds)
        remove_own(folder.store, {entry.name: entry.bytes for entry in ended})
        self._settle_next_note(folder)
        ours = (NOTE, NEXT_NOTE, QUARANTINE, REMOVING, READING_PREFIX, *_PROMOTED, _COPIES)
        self._remove_temporaries(folder.store, folder.entries, ours)
        self._remove_index_temporaries(folder)

    def _remove_index_temporaries(self, folder: StepFolder) -> None:
        """Remove what promoters that were killed have left of the index, which another one has published since."""
        left = [entry for entry in folder.entries if (temporary_of(entry.name) or ("",))[0] == METADATA_NAME]
        if left and not running_saves(folder.store, stale_after_seconds=self._stale_after_seconds):
            self._remove_temporaries(folder.store, left, (METADATA_NAME,))

    def _settle_next_note(self, folder: StepFolder) -> None:
        """Settle the note of a killed save: it becomes current if its checkpoint was published."""
        if NEXT_NOTE not in folder.names or self._is_being_saved(folder):
            return
        note = read_note(folder.store, NEXT_NOTE)
        if note is not None and note.replaces != _index_digest(folder):
            self._promote(folder)
        else:
            folder.store.delete(NEXT_NOTE)

    def _remove_temporaries(self, store: Store, entries: Collection[Entry], names: tuple[str, ...]) -> None:
        """Remove temporary files of the given objects that are so old that their writers must be dead."""
        for entry in entries:
            becomes = temporary_of(entry.name)
            is_ours = becomes is not None and becomes[0].startswith(names)
            if is_ours and time.time() - entry.mtime > _PUBLISHING_SECONDS:
                store.delete(entry.name)

    def _is_being_saved(self, folder: StepFolder) -> bool:
        """Whether a save may be running in a folder, or about to begin there."""
        if running_saves(folder.store, stale_after_seconds=self._stale_after_seconds):
            return True
        note = read_note(folder.store, NEXT_NOTE if NEXT_NOTE in folder.names else NOTE)
        if note is None or note.process is None or note.process == this_process() or is_gone(note.process):
            return False
        return abs(time.time() - note.created_seconds) < self._stale_after_seconds

    def _has_readers(self, store: Store) -> bool:
        """Whether a folder has the lease of a reader that is not known to be dead."""
        return bool(live_readers(store, stale_after_seconds=self._stale_after_seconds))

    def _remove(self, folder: StepFolder) -> bool:
        left = remove_checkpoint(folder.store, also=frozenset({NOTE, NEXT_NOTE, QUARANTINE, REMOVING}))
        if left:
            _log.warning("%s stays, since it holds files that no save has made: %s", folder.store.url, ", ".join(left))
        return not left


def _index_digest(folder: StepFolder) -> str:
    """Return a digest of all index files in the folder, which identifies the save that wrote them; `""` if none."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (names := sorted(filter(is_index_name, folder.names))):
        digest.update(f"{name}\n".encode() + (read_if_there(folder.store, name) or b""))
    return digest.hexdigest() if names else ""
