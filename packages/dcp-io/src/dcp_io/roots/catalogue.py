"""`Catalogue`: the checkpoints under one root, over any store.

A checkpoint's folder may contain `.dcp-note.json` (metrics and the saving process), `.dcp-note-next.json` (note of a
save that has not yet replaced the checkpoint), `.dcp-quarantined.json` (damaged), `.dcp-reading-<id>` (a reader's
lease) and `.dcp-removing` (removal has begun).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, TypeVar, runtime_checkable

from dcp_base.errors import DcpError
from dcp_base.logs import library_logger
from dcp_io.checkpoints.drop_parts import SmallerCheckpoint
from dcp_io.checkpoints.list_checkpoints import ask_places, check_checkpoint, running_saves
from dcp_io.checkpoints.remove_checkpoint import (
    READING_PREFIX,
    ReadingSign,
    clear_dead_saves,
    is_dead_sign,
    remove_checkpoint,
)
from dcp_io.checkpoints.verify_checkpoint import verify_checkpoint
from dcp_io.errors import SaveInProgressError
from dcp_io.roots.copy_notes import HOST_FILE, HOSTS_FILE, NAME, CopyNote
from dcp_io.roots.keeping_rules import KeepAll, KeepBest, KeepLast, KeepPolicy, parts_of
from dcp_io.roots.records import CheckpointRecord, Note, OnceLog, read_if_allowed, read_if_there, read_note
from dcp_io.roots.unfinished import Unfinished, describe_unfinished, ended_journals
from dcp_io.saves.cleanup import index_digest, remove_orphans, remove_own
from dcp_io.saves.save_files import own_name, temporary_of, this_process
from dcp_io.stores.host_store import HostStore
from dcp_io.stores.root import Root
from dcp_io.stores.store import Entry, Store, SupportsFolders, with_folders
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_manifest.folders.checkpoint_order import step_of
from dcp_manifest.folders.find_checkpoints import FoundCheckpoint
from dcp_manifest.folders.folder import (
    METADATA_NAME,
    NEXT_NOTE,
    NOTE,
    QUARANTINE,
    REMOVING,
    SAVE_MARKER_PREFIX,
    is_index_name,
    parse_quarantine,
    put_aside_reason,
)

_log = library_logger(__name__)

T = TypeVar("T")

LATEST = "latest"
# The root may belong to a run with tiers, whose description and host ids are files in it.
_ROOT_FILES = (LATEST, "run.tiers.toml", HOST_FILE, HOSTS_FILE)
# After this time, publishing a few bytes has ended, or its process is dead.
_PUBLISHING_SECONDS = 5.0
# Least difference of the creation times of two checkpoints, even if the clocks of their hosts differ.
_TICK_SECONDS = 0.001
# Prefixes of the markers of running saves, of the notes of promoters between tiers, and of copies on other hosts.
_PROMOTED, _COPIES = (".dcp-promot", ".dcp-forgone-", ".dcp-refused-"), ".dcp-copies"


@dataclass(frozen=True, slots=True)
class StepFolder:
    """Listing of one checkpoint folder."""

    step: int
    store: Store
    entries: tuple[Entry, ...]

    @property
    def names(self) -> frozenset[str]:
        """Names of its objects."""
        return frozenset(entry.name for entry in self.entries)

    @property
    def is_good(self) -> bool:
        """Whether it has a checkpoint that is not known to be damaged."""
        return self.is_checkpoint and put_aside_reason(self.names) is None

    @property
    def is_checkpoint(self) -> bool:
        """Whether it has an index and is not marked for removal."""
        names = self.names
        return REMOVING not in names and any(map(is_index_name, names))


class Catalogue:
    """Catalogue of the checkpoints under a root.

    Args:
        root: The folder above all checkpoints.
        stale_after_seconds: Time without renewal after which a process on another host counts as dead.
        folder_prefix: Prefix of checkpoint folder names, before the step. Raises ValueError if steps cannot be parsed.

    Ranks: the coordinator; no method is collective.
    """

    def __init__(self, root: Store, *, stale_after_seconds: float, folder_prefix: str = "step-") -> None:
        if "/" in folder_prefix or step_of(f"{folder_prefix}10") != 10:
            raise ValueError(
                f"folder_prefix is {folder_prefix!r}: no tool would read step 10 from {folder_prefix + '10'!r}; choose "
                "one like 'step-' or 'checkpoint-'"
            )
        self._prefix = folder_prefix
        self._root = with_folders(root)
        self._stale_after_seconds = stale_after_seconds
        self._notes: dict[int, tuple[Entry, Note | None]] = {}
        self._smaller: dict[int, tuple[tuple[str, ...], set[Entry]]] = {}
        """Step → parts that stay, and the indexes that were found to have no others."""
        self._complete: set[int] = set()
        self._warn_once = OnceLog().warn
        self._sound: set[int] = set()

    @property
    def store(self) -> SupportsFolders:
        """The root."""
        return self._root

    def folder_name(self, step: int) -> str:
        """Return a step's folder name."""
        return f"{self._prefix}{step}"

    def store_of(self, step: int) -> Store:
        """Return the store of a step's folder, which may be missing."""
        return self._root.child(self.folder_name(step))

    def folders(self) -> list[StepFolder]:
        """Return all checkpoint folders by ascending step, also damaged, unpublished or half removed ones.

        Unreadable folders are skipped, with a warning.
        """
        return [folder for step in self._steps() if (folder := self._folder_if_allowed(step)) is not None]

    def _folder_if_allowed(self, step: int) -> StepFolder | None:
        try:
            return self._folder(step)
        except PermissionError as error:
            self._warn_once("step %d is left out, which may not be read: %s", step, error)
            return None

    def _steps(self) -> list[int]:
        """Other names, such as `step-02`, are ignored."""
        found = ((name, step_of(name)) for name in self._root.folders())
        return sorted(step for name, step in found if step is not None and name == self.folder_name(step))

    def _folder(self, step: int) -> StepFolder:
        store = self.store_of(step)
        return StepFolder(step, store, tuple(store.list()))

    def highest(self) -> CheckpointRecord | None:
        """Return the checkpoint with the highest step that is not known to be damaged."""
        folders = map(self._folder_if_allowed, reversed(self._steps()))
        return next((self._record(folder) for folder in folders if folder is not None and folder.is_good), None)

    def is_good(self, step: int) -> bool:
        """See `StepFolder.is_good`."""
        return self._folder(step).is_good

    def has_checkpoint(self, step: int) -> bool:
        """See `StepFolder.is_checkpoint`."""
        return self._folder(step).is_checkpoint

    def records(self, folders: Collection[StepFolder] | None = None) -> list[CheckpointRecord]:
        """Return the records by ascending step, including quarantined checkpoints; no index is read.

        `folders` is a fresh result of `folders()`.
        """
        listed = self.folders() if folders is None else folders
        steps = {folder.step for folder in listed}
        for step in set(self._notes) - steps:  # whole steps: a save in the background may end meanwhile
            self._notes.pop(step, None)
        return [self._record(folder) for folder in listed if folder.is_checkpoint]

    def unfinished(self, above: int) -> list[Unfinished]:
        """Return the unfinished saves and copies of steps above `above`, highest first."""
        found = []
        for step in reversed([step for step in self._steps() if step > above]):
            folder = self._folder(step)
            if not folder.is_checkpoint and REMOVING not in folder.names:
                stale = self._stale_after_seconds
                found.append(describe_unfinished(step, folder.store, folder.entries, stale_after_seconds=stale))
        return [one for one in found if one is not None]

    @staticmethod
    def newest_first(
        catalogues: Sequence[Catalogue], ask: Callable[[Catalogue], Sequence[CheckpointRecord]] | None = None
    ) -> list[tuple[CheckpointRecord, int]]:
        """Return the records of a run's copies, with their catalogues' numbers: what a restore tries, in order.

        The highest step precedes; of its copies, that of the first catalogue. A failing place is left out, with a
        warning, if others have checkpoints. `ask` returns a catalogue's records, by default its `records()`.

        Raises OSError if no place with checkpoints can be read.
        """
        found = _ask_all(catalogues, ask or Catalogue.records)
        copies = [(record, number) for number, records in enumerate(found) for record in records]
        return sorted(copies, key=lambda copy: (-copy[0].step, copy[1]))

    @staticmethod
    def unfinished_above(catalogues: Sequence[Catalogue], step: int | None) -> list[Unfinished]:
        """Return the unfinished saves and copies of higher steps, or of all steps, in places that can be read."""
        above = -1 if step is None else step
        return [*chain(*_ask_all(catalogues, lambda catalogue: catalogue.unfinished(above), optional=True))]

    def _record(self, folder: StepFolder) -> CheckpointRecord:
        note = self._note(folder)
        created = max((entry.mtime for entry in folder.entries if is_index_name(entry.name)), default=0.0)
        reason = None
        if QUARANTINE in folder.names:
            reason, _ = parse_quarantine(read_if_allowed(folder.store, QUARANTINE) or b"")
        if note is None:
            return CheckpointRecord(folder.step, created, quarantined=reason)
        created = created if note.created_seconds is None else note.created_seconds
        return CheckpointRecord(folder.step, created, note.metrics, reason)

    def _note(self, folder: StepFolder) -> Note | None:
        entry = next((entry for entry in folder.entries if entry.name == NOTE), None)
        if entry is None:
            return None
        known = self._notes.get(folder.step)
        if known is None or known[0] != entry:
            note = Note.from_bytes(read_if_allowed(folder.store, NOTE) or b"")
            known = self._notes[folder.step] = (entry, note)
        return known[1]

    def check(self, step: int) -> None:
        """Raise the errors of `check_checkpoint`."""
        folder = self._folder(step)
        check_checkpoint(folder.store, entries=folder.entries)

    def is_complete(self, step: int) -> bool:
        """Whether a checkpoint can be loaded, by index and file sizes; False if it is unreadable now. True is cached.

        With parts on several hosts, only this host's part counts, because no host sees the others' files.
        """
        if step in self._complete | self._sound:
            return True
        try:
            self.check(step)
        except (DcpError, OSError) as error:
            self._warn_once("step %d does not count as a checkpoint to keep: %s", step, error)
            return False
        self._complete.add(step)
        return True

    def is_sound(self, step: int) -> bool:
        """Whether this process has written, copied or restored a checkpoint, or else finds all its bytes sound now.

        With parts on several hosts, only this host's part counts.
        """
        if step in self._sound:
            return True
        store = self.store_of(step)
        try:
            problems = verify_checkpoint(store).problems
            if isinstance(store, HostStore):
                problems = tuple(one for one in problems if one.file is None or store.exists(one.file))
        except (DcpError, OSError) as error:
            self._warn_once("step %d cannot be read, and does not count as sound: %s", step, error)
            return False
        if problems:
            self._warn_once("step %d is damaged, and does not count as a checkpoint to keep: %s", step, problems[0])
            return False
        self._sound.add(step)
        return True

    def note_sound(self, step: int) -> None:
        """Record that this process has read a whole checkpoint."""
        self._sound.add(step)

    def prepare(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        after: CheckpointRecord | None = None,
        best: Sequence[KeepBest] = (),
    ) -> None:
        """Write the note of the save that this process is about to begin; `best` is for `dcp prune`.

        A damaged checkpoint of the step is removed first. An undamaged one keeps its note until `published`. The note's
        creation time follows the checkpoint `after`, even if this host's clock is behind.
        """
        folder = self._folder(step)
        if QUARANTINE in folder.names or REMOVING in folder.names:
            self._remove(folder)
            folder = self._folder(step)
        folder.store.make()
        seconds = time.time() if after is None else max(time.time(), after.created_seconds + _TICK_SECONDS)
        keeps = " | ".join([each.text() for each in best])
        note = Note.now(step, seconds, metrics, index_digest(folder.store, folder.names), keeps)
        self._write_note(folder, NEXT_NOTE if folder.is_checkpoint else NOTE, note.to_bytes())

    def _write_note(self, folder: StepFolder, name: str, data: bytes) -> None:
        self._notes.pop(folder.step, None)
        folder.store.publish(name, data, sync=False)

    def published(self, step: int) -> None:
        """Write a step's folder name to the root's file `latest`, and make its new note current.

        The checkpoint must be durable.
        """
        self._sound.add(step)
        self._root.publish(LATEST, f"{self.folder_name(step)}\n".encode())
        self._promote(self._folder(step))

    def failed(self, step: int) -> None:
        """Remove the note of a failed save."""
        self.store_of(step).delete(NEXT_NOTE)

    def _promote(self, folder: StepFolder) -> None:
        data = read_if_there(folder.store, NEXT_NOTE) if NEXT_NOTE in folder.names else None
        if data is not None:
            self._write_note(folder, NOTE, data)
            folder.store.delete(NEXT_NOTE)

    def quarantine(self, step: int, reason: str) -> None:
        """Write the reason into a file that makes readers skip the checkpoint."""
        data = json.dumps({"reason": reason, "found": time.time()}, indent=1).encode()
        self.store_of(step).publish(QUARANTINE, data)

    @contextlib.contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Hold a reader's lease on a checkpoint, which prevents its removal.

        Raises CheckpointNotFoundError if it is missing or being removed.
        """
        store = self.store_of(step)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(ReadingSign(store, stale_after_seconds=self._stale_after_seconds))
            except FileNotFoundError as error:
                raise CheckpointNotFoundError(
                    f"there is no checkpoint in {store.url}: the directory is missing"
                ) from error
            except OSError as error:  # a full disk, or a root that may only be read, must not prevent reading
                _log.warning("%s is read without a sign that keeps it from being removed: %s", store.url, error)
            else:
                if store.exists(REMOVING):
                    raise CheckpointNotFoundError(f"{store.url} is being removed; choose another checkpoint")
            yield

    def remove(self, step: int) -> bool:
        """Remove a checkpoint unless a process reads it or saves to it; returns whether it was removed.

        If a symbolic link in the root points to it, or this user may not remove some files, it stays, with a warning.
        """
        try:
            return not self._is_linked(step) and self._remove_unused(step)
        except PermissionError as error:
            self._warn_once("step %d stays, which may not be removed: %s", step, error)
            return False

    def retain(
        self,
        policy: KeepPolicy,
        *,
        arrived: int | None = None,
        spares_higher: bool = False,
        protected: Callable[[Sequence[StepFolder]], Collection[int]],
    ) -> tuple[list[int], list[StepFolder] | None]:
        """Remove the checkpoints, and parts of checkpoints, that a policy does not keep; none if all are damaged.

        For every policy:

        1. `KeepLast` and `KeepBest` count only loadable checkpoints.
        2. The newest loadable checkpoint stays, and so does the last one that copies on other hosts protect.
        3. A damaged checkpoint stays, for inspection, as long as a good one of its step would.
        4. Checkpoints that a process reads or saves stay, and so do those to which a link in the root points. One that
           cannot be removed stays, with a warning, until the next call.
        5. Only complete, undamaged checkpoints whose files are on one host become smaller.

        Args:
            policy: Policy that selects among the complete checkpoints.
            arrived: The step that was published or copied last (by default, made last); it stays.
            spares_higher: Whether undamaged checkpoints of higher steps than `arrived` stay.
            protected: Returns further steps that stay, from the root's listing.

        Returns the removed steps, and the listing without them (None if it is not needed). Raises OSError.
        """
        if any(isinstance(part, KeepAll) and part.parts is None for part in parts_of(policy)):
            return [], None
        folders = self.folders()
        records = CheckpointRecord.by_creation(self.records(folders))
        good = [record for record in records if record.quarantined is None]
        if not good:
            return [], folders
        last = good[-1].step
        arrived = last if arrived is None else arrived
        copied = _newest_protected(folders, good)
        always = {*protected(folders), arrived, last, *(() if copied is None else (copied,))}
        always |= {record.step for record in good if spares_higher and record.step > arrived}
        stay = (policy | KeepLast(1)).select(records, always, self.is_complete)
        removed = [record.step for record in records if record.step not in stay and self._try_to_remove(record.step)]
        by = " | ".join(repr(part) for part in parts_of(policy) if part.parts is not None)
        for folder in folders:
            if (parts := stay.get(folder.step)) is not None:
                self._keep_parts(folder, parts, by)
        return removed, [folder for folder in folders if folder.step not in removed]

    def _is_linked(self, step: int) -> bool:
        links = FoundCheckpoint(self.store_of(step), 0.0).links()
        if links:
            text = "step %d stays as it is, since a symbolic link points to it: %s; remove the link if it may go"
            self._warn_once(text, step, ", ".join(links))
        return bool(links)

    def _try_to_remove(self, step: int) -> bool:
        try:
            return self.remove(step)
        except OSError as error:
            self._warn_once("step %d could not be removed; it is tried again after the next save: %s", step, error)
            return False

    def _keep_parts(self, folder: StepFolder, parts: tuple[str, ...], by: str) -> None:
        """Remove everything else, unless a part is unknown. A checkpoint that has not changed is not read again."""
        state = parts, {entry for entry in folder.entries if is_index_name(entry.name)}
        if self._smaller.get(folder.step) == state:
            return
        if isinstance(self._root, HostStore):
            self._smaller[folder.step] = state
            _log.warning("%s stays whole: its files may be on several hosts", folder.store.url)
            return
        if not self.is_complete(folder.step) or self._is_linked(folder.step):
            return
        try:
            smaller = SmallerCheckpoint(folder.store, keep=parts)
            if smaller.unknown or smaller.is_empty:
                _log.warning("%s stays whole: it has nothing of %s", folder.store.url, _unknown_parts(smaller, parts))
            else:
                smaller.publish(by=by, stale_after_seconds=self._stale_after_seconds)
        except SaveInProgressError:
            return
        except CorruptCheckpointError as error:
            _log.warning("%s stays whole until it changes, since it is damaged: %s", folder.store.url, error)
        except (OSError, DcpError) as error:
            self._warn_once("%s could not be made smaller, which is tried again: %s", folder.store.url, error)
            return
        self._smaller[folder.step] = state

    def steps_to_resume_from(self, folders: Collection[StepFolder], good: Sequence[CheckpointRecord]) -> set[int]:
        """Return the steps without which a run could lose progress. Raises OSError.

        They are the last step that copies on other hosts protect, the newest sound checkpoints, by creation and by step
        (clocks may be wrong, and a restore takes the highest step), and newer unsound ones. `good` is not quarantined
        and in the order of creation; a single checkpoint stays without being read.
        """
        copied = _newest_protected(folders, good)
        by_step = [replace(record, created_seconds=record.step) for record in good]
        if len(good) == 1:
            return {good[0].step, *(() if copied is None else (copied,))}
        read = [KeepLast(1).select(some, (), self.is_sound) for some in (good, by_step)]
        return set().union(() if copied is None else (copied,), *read)

    def _remove_unused(self, step: int) -> bool:
        folder = self._folder(step)
        if running_saves(folder.store, stale_after_seconds=self._stale_after_seconds):
            return False
        folder.store.publish(REMOVING, b"", sync=False)  # empty, which is possible even on a full disk
        if self._has_readers(folder.store):
            folder.store.delete(REMOVING)
            return False
        return self._remove(self._folder(step))

    def sweep(self, folders: Collection[StepFolder] | None = None, *, running: Collection[int] = ()) -> list[int]:
        """Remove leftovers of killed saves and interrupted removals; return the steps of removed folders.

        `folders` is a fresh result of `folders()`. This process is saving the steps in `running`.
        """
        at_root = self._root.list()
        self._remove_temporaries(self._root, at_root, _ROOT_FILES)
        listed = self.folders() if folders is None else folders
        # The storage's clock, not that of this host: a save has just written, or the leftovers stay for now.
        now = max(
            (entry.mtime for entries in (at_root, *(each.entries for each in listed)) for entry in entries), default=0
        )
        return [folder.step for folder in listed if folder.step not in running and self._sweep_if_allowed(folder, now)]

    def _sweep_if_allowed(self, folder: StepFolder, now: float) -> bool:
        try:
            return self._sweep(folder, now)
        except PermissionError as error:
            self._warn_once("leftovers of step %d stay: %s", folder.step, error)
            return False

    def _sweep(self, folder: StepFolder, now: float) -> bool:
        if folder.is_checkpoint:
            self._tidy(folder, now)
            return False
        folder = self._folder(folder.step)  # a save may have begun, or ended, since it was listed
        if REMOVING in folder.names:
            return not self._has_readers(folder.store) and self._remove(folder)
        return not (folder.is_checkpoint or self._is_being_saved(folder, now)) and self._remove(folder)

    def _tidy(self, folder: StepFolder, now: float) -> None:
        if any(name.startswith(SAVE_MARKER_PREFIX) for name in folder.names):
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
        remove_orphans(folder.store, folder.entries, now=now, stale_after_seconds=self._stale_after_seconds)
        self._settle_next_note(folder, now)
        ours = (NOTE, NEXT_NOTE, QUARANTINE, REMOVING, READING_PREFIX, *_PROMOTED, _COPIES)
        self._remove_temporaries(folder.store, folder.entries, ours)
        self._remove_index_temporaries(folder)

    def _remove_index_temporaries(self, folder: StepFolder) -> None:
        left = [entry for entry in folder.entries if (temporary_of(entry.name) or ("",))[0] == METADATA_NAME]
        if left and not running_saves(folder.store, stale_after_seconds=self._stale_after_seconds):
            self._remove_temporaries(folder.store, left, (METADATA_NAME,))

    def _settle_next_note(self, folder: StepFolder, now: float) -> None:
        """A killed save's note becomes current if its checkpoint was published."""
        if NEXT_NOTE not in folder.names or self._is_being_saved(folder, now):
            return
        # A note that this user may not read raises an error: it must not count as missing.
        note = Note.from_bytes(read_if_there(folder.store, NEXT_NOTE) or b"")
        if note is not None and note.replaces not in (None, index_digest(folder.store, folder.names)):
            self._promote(folder)
        else:
            folder.store.delete(NEXT_NOTE)

    def _remove_temporaries(self, store: Store, entries: Collection[Entry], names: tuple[str, ...]) -> None:
        for entry in entries:
            becomes = temporary_of(entry.name)
            is_ours = becomes is not None and becomes[0].startswith(names)
            if is_ours and time.time() - entry.mtime > _PUBLISHING_SECONDS:
                store.delete(entry.name)

    def _is_being_saved(self, folder: StepFolder, now: float) -> bool:
        if running_saves(folder.store, stale_after_seconds=self._stale_after_seconds):
            return True
        # A save of PyTorch has no marker, and its files have no save id in their names.
        owned = [(own_name(entry.name), entry.mtime) for entry in folder.entries]
        unmarked = [at for own, at in owned if own is not None and own.kind == "data" and own.save_id is None]
        if now - max(unmarked, default=-math.inf) < self._stale_after_seconds:
            return True
        name = NEXT_NOTE if NEXT_NOTE in folder.names else NOTE
        note = read_note(folder.store, name)
        if note is None or note.process is None or note.process == this_process() or note.process.is_gone():
            return False
        began = note.created_seconds
        if began is None:
            began = next((entry.mtime for entry in folder.entries if entry.name == name), 0.0)
        return abs(time.time() - began) < self._stale_after_seconds

    def _has_readers(self, store: Store) -> bool:
        return bool(ReadingSign.alive(store, stale_after_seconds=self._stale_after_seconds))

    def _remove(self, folder: StepFolder) -> bool:
        self._complete.discard(folder.step)
        self._sound.discard(folder.step)
        left = remove_checkpoint(folder.store, also=frozenset({NOTE, NEXT_NOTE, QUARANTINE, REMOVING}))
        if left:
            _log.warning("%s stays, since it holds files that no save has made: %s", folder.store.url, ", ".join(left))
        return not left


@runtime_checkable
class PromotingRoot(Root, Protocol):
    """Protocol of a root of several places with a promoter, which a checkpoint manager starts, wakes and ends.

    Ranks: the coordinator; no method is collective.
    """

    @property
    def folder_prefix(self) -> str:
        """Prefix of checkpoint folder names."""
        ...

    @property
    def keep_policy(self) -> KeepPolicy:
        """Policy for the first place; it keeps checkpoints that other places lack."""
        ...

    def kept_by(self, policy: KeepPolicy) -> KeepPolicy:
        """Return the manager's policy, extended to keep checkpoints that other places lack.

        From now on, the promoter removes nothing from the first place.
        """
        ...

    def make_room(self, step: int, *, hurry: bool) -> bool:
        """Make room in the first place; False if the save should wait and ask again.

        `hurry` means that the save cannot wait.
        """
        ...

    def start_promoter(self) -> None:
        """Start the promoter, unless it runs; failures are logged."""
        ...

    def wake_promoter(self) -> None:
        """Make the promoter look for new checkpoints."""
        ...

    def end_promoter(self, timeout_seconds: float) -> object:
        """Wait until everything is copied; after `timeout_seconds`, the promoter continues alone."""
        ...


def _ask_all(
    catalogues: Sequence[Catalogue], ask: Callable[[Catalogue], Sequence[T]], *, optional: bool = False
) -> list[Sequence[T]]:
    by_url = {catalogue.store.url: catalogue for catalogue in catalogues}
    stores = [catalogue.store for catalogue in catalogues]
    return ask_places(stores, lambda store: ask(by_url[store.url]), optional=optional)


def _unknown_parts(smaller: SmallerCheckpoint, parts: Collection[str]) -> str:
    """Return the parts that a checkpoint does not have, each with names that may be meant."""
    import difflib  # noqa: PLC0415 - for a warning only

    all_names, texts = smaller.whole.names(), []
    for part in smaller.unknown or parts:
        depth = part.count(".") + 1
        likely = {".".join(name.split(".")[:depth]) for name in all_names}
        found = difflib.get_close_matches(part, likely)
        texts.append(part + (f" (similar: {', '.join(found)})" if found else ""))
    return ", ".join(texts)


def _newest_protected(folders: Collection[StepFolder], records: Sequence[CheckpointRecord]) -> int | None:
    """`records` are undamaged and by creation."""
    by_step = {folder.step: folder for folder in folders if NAME in folder.names}
    for record in reversed(records):
        folder = by_step.get(record.step)
        if folder is not None and CopyNote.read(folder.store, folder.entries).protected:
            return record.step
    return None
