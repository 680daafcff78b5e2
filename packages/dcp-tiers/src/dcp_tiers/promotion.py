"""Promotion to one tier: its sources, pending steps, their order, and retention."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from dcp_base import CheckpointEvent, DcpError, installed
from dcp_base.logs import library_logger
from dcp_io import CheckpointRecord, Entry, HostStore, SaveInProgressError, StorageError, Store
from dcp_io.roots.catalogue import Catalogue, StepFolder
from dcp_io.saves.cleanup import read_current
from dcp_io.timed_call import Pace, TimedCall
from dcp_manifest import CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError
from dcp_manifest.folders.folder import METADATA_NAME
from dcp_manifest.index.columns import ManifestInfo
from dcp_tiers.copying import SupersededError, copy_checkpoint, copy_part
from dcp_tiers.removal import make_room, retain_in
from dcp_tiers.tier import TiersError, is_same_place
from dcp_tiers.tiers import Tiers
from dcp_tiers.waiting import (
    TieredRoot,
    arrival_is_noted,
    forget_arrival,
    has_arrived,
    note_arrival,
    note_forgone,
    note_refusal,
    select_waiting,
)

_log = library_logger(__name__)

# A slow listing (10,000 checkpoints take a second) is reused for 20 times as long as it took.
_QUICK_LISTING_SECONDS, _REUSED = 0.05, 20.0


@dataclass(frozen=True, slots=True)
class Held:
    """Undamaged checkpoints in one nearer tier."""

    number: int
    folders: dict[int, StepFolder]
    records: dict[int, CheckpointRecord]
    waiting: frozenset[int]
    """Steps that the further tier needs."""
    arrived: frozenset[int]
    """Steps with a note of arrival."""
    sizes: dict[int, int]

    def index_entry(self, step: int) -> Entry | None:
        """Return an index's entry in the listing."""
        return next((entry for entry in self.folders[step].entries if entry.name == METADATA_NAME), None)


class Sources:
    """Listings of the tiers before `number`, for one thread."""

    def __init__(self, tiers: TieredRoot, number: int) -> None:
        self._tiers = tiers
        self._number = number
        self._held: list[Held] = []
        self._until = 0.0
        self._silent: set[int] = set()

    def look(self, *, afresh: bool = True) -> list[Held]:
        """Return the readable tiers, cached if listing is slow unless `afresh`. Raises OSError for the first tier."""
        begun = time.monotonic()
        if not afresh and begun < self._until:
            return self._held
        middle = [self._ask(holder) for holder in range(1, self._number)]
        self._held = [self._list(0), *(held for held in middle if held is not None)]
        seconds = time.monotonic() - begun
        self._until = begun + seconds * (1 + _REUSED) if seconds > _QUICK_LISTING_SECONDS else 0.0
        return self._held

    def _list(self, holder: int) -> Held:
        catalogue, tier = self._tiers.catalogues[holder], self._tiers.tiers[self._number]
        good = [folder for folder in catalogue.folders() if folder.is_good]
        records = catalogue.records(good)
        return Held(
            holder,
            {folder.step: folder for folder in good},
            {record.step: record for record in records},
            frozenset(select_waiting(tier, good, records)),
            frozenset(folder.step for folder in good if arrival_is_noted(folder.entries, tier.url)),
            {folder.step: sum(entry.bytes for entry in folder.entries) for folder in good},
        )

    def _ask(self, holder: int) -> Held | None:
        try:
            held = TimedCall(self._tiers.tiers[holder].url, partial(self._list, holder)).result()
        except Exception as error:  # noqa: BLE001 - clients of storages raise errors of all kinds
            self._say(holder, str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")
            return None
        self._silent.discard(holder)
        return held

    def _say(self, holder: int, problem: str) -> None:
        if holder not in self._silent:
            self._silent.add(holder)
            tiers: Sequence[str] = [tier.url for tier in self._tiers.tiers]
            _log.warning("%s gets nothing from %s for now: %s", tiers[self._number], tiers[holder], problem)


_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 60.0
# Tidying a tier with many checkpoints takes long, so most copies skip it then.
_QUICK_SECONDS, _RARELY = 0.05, 20.0
_FULL = {errno.ENOSPC, errno.EDQUOT}
# A retry helps with none of these.
_REFUSED = (CorruptCheckpointError, SupersededError, UnsafeCheckpointError, UnsupportedFormatError)


class Promotion:
    """Promotion to tier `number` (at least 1), by ascending step, in one process: the lease refuses a second one."""

    def __init__(self, tiers: Tiers, number: int) -> None:
        self._tiers = tiers
        self._number = number
        self._tier = tiers.tiers[number]
        self._target = tiers.catalogues[number]
        self._limit = Pace(self._tier.rate_bytes_per_second)
        self._sources = Sources(tiers, number)
        self._met = self._compared = False
        self._superseded: set[int] = set()
        self._parts: set[int] = set()
        """Steps of which the tier has only this host's part."""
        self._settled: dict[tuple[int, int], Entry | None] = {}
        """(Nearer tier, step) → index that need not be sent, whatever older listings say."""
        self._reported: Sequence[Held] = ()
        self._waiting_bytes: int | None = None
        self._tidied_until = 0.0
        self._untidied: int | None = None
        """The last arrived step, if it was not tidied for."""
        self.refused: dict[int, str] = {}
        """Steps that cannot be promoted, with reasons."""
        self._aside: set[int] = set()  # steps that fail while others arrive: they are retried after the others
        self._turns = itertools.count()  # of the steps that are tried when another one has failed
        self.progressed_seconds = time.monotonic()
        """Monotonic time of the last bytes, or with nothing pending."""
        self.problem: str | None = None
        """The storage's last failure; None after a success."""

    @property
    def url(self) -> str:
        """Path or URI of the target tier."""
        return self._tier.url

    def waiting(self) -> list[int]:
        """Return the steps that the tier needs, ascending."""
        return self._waiting(self._sources.look())

    def _waiting(self, held: Sequence[Held]) -> list[int]:
        steps = {step for one in held for step in one.waiting if not self._is_settled(one, step)}
        return sorted(steps - {*self.refused})

    def _is_settled(self, held: Held, step: int) -> bool:
        key = held.number, step
        return key in self._settled and self._settled[key] == held.index_entry(step)

    def run(self, pause: Callable[[float], bool]) -> bool:
        """Promote until no step is pending, with retries, or `pause` (which waits seconds) returns False."""
        seconds = _FIRST_PAUSE_SECONDS
        while True:
            try:
                if not self.promote_next():
                    self.progressed_seconds = time.monotonic()
                    self.problem = None
                    return True
            except Exception as error:  # noqa: BLE001 - clients of storages raise errors of all kinds
                self._report_failure(error, seconds)
                if isinstance(error, OSError) and error.errno in _FULL:
                    with contextlib.suppress(OSError, DcpError):  # remove leftovers
                        self._target.sweep(running=self.waiting())
                if not pause(seconds):
                    return False
                seconds = min(2 * seconds, _LONGEST_PAUSE_SECONDS)
            else:
                seconds = _FIRST_PAUSE_SECONDS

    def _report_failure(self, error: Exception, seconds: float) -> None:
        problem = f"{type(error).__name__}: {error}"
        level = logging.DEBUG if problem == self.problem else logging.WARNING
        self.problem = problem
        strange = not isinstance(error, (OSError, DcpError))
        _log.log(level, "promotion to %s is tried again in %.1f s: %s", self.url, seconds, problem, exc_info=strange)
        self._emit("retry", error=self.problem)

    def promote_next(self) -> bool:
        """Promote the lowest pending step; return False if there is none.

        A step that cannot be promoted goes to `refused`, with an event, and is not retried. A host's part is skipped if
        the tier has a later save. Retry after OSError or DcpError.
        """
        held = self._sources.look(afresh=False)
        if not self._compared:
            held = self._compare(held)
        waiting = self._waiting(held)
        if not waiting:
            held = self._sources.look()
            waiting = self._waiting(held)
        self._report_superseded(held, waiting)
        self._report_waiting(held, waiting)
        if not waiting:
            self._tidy_at_last()
            return False
        self._meet(held)
        self._aside.intersection_update(waiting)
        ready = [step for step in waiting if step not in self._aside] or waiting
        step = next((step for step in ready if step not in self._parts), ready[0])
        begun, others = self.progressed_seconds, [other for other in waiting if other != step]
        try:
            self._take(step, held, waiting)
        except Exception as error:
            if not others or self.progressed_seconds != begun or not self._may_skip(error):
                raise
            other = others[next(self._turns) % len(others)]
            with contextlib.suppress(Exception):  # of the storage, probably
                self._take(other, held, waiting)
                if other not in self.refused:
                    self._report_failure(error, 0.0)
                    self._retry(step)
                    return True
            raise
        return True

    def _may_skip(self, error: Exception) -> bool:
        # Not if the whole storage fails. Parts of hosts arrive in order.
        is_full = isinstance(error, OSError) and error.errno in _FULL
        places = self._tiers.places[: self._number]
        return not (is_full or isinstance(error, StorageError) or any(isinstance(one, HostStore) for one in places))

    def _retry(self, step: int) -> None:
        # A step that fails again after another one has arrived is at fault itself.
        held = self._sources.look()
        waiting = self._waiting(held)
        if step in self._aside or step not in waiting:
            return
        try:
            self._take(step, held, waiting)
        except Exception as error:  # noqa: BLE001 - as in `run`
            self._aside.add(step)
            self.problem = f"{type(error).__name__}: {error}"
            text = "step %d is not promoted to %s for now, others are: %s. Repair the file, or remove the step"
            _log.warning(text, step, self.url, self.problem)
            self._emit("retry", error=self.problem)

    def _take(self, step: int, held: Sequence[Held], waiting: Sequence[int]) -> None:
        holders = [one for one in held if step in one.folders]
        try:
            if not self._promote(step, holders):
                return self._wait_for_hosts(step, waiting)
        except _REFUSED as error:
            # Parts that one host kept while it was out of the job: the others have saved the step again.
            is_part = isinstance(self._tiers.places[holders[0].number], HostStore)
            if isinstance(error, SupersededError) and is_part and self._target.is_good(step):
                return self._give_up(step, holders, error)
            self.refused[step] = str(error)
            self._note_refusal(step, holders)
            _log.error("step %d is not promoted to %s: %s", step, self.url, error)
            return None
        self._parts.discard(step)
        return self._tidy(step, running=[other for other in waiting if other != step])

    def _meet(self, held: Sequence[Held]) -> None:
        if self._met:
            return
        for one in held:
            if is_same_place(self._tiers.places[one.number], self._target.store):
                other = self._tiers.tiers[one.number].url
                raise TiersError(f"{self.url} and {other} are the same directory; each tier needs one of its own")
        self._tiers.write_to(self._number)
        self._met = True

    def _compare(self, held: list[Held]) -> list[Held]:
        self._compared = True
        if not any(one.arrived for one in held):
            return held
        try:
            folders = self._target.folders()
            there = {record.step: record for record in self._target.records(folders)}
        except (OSError, DcpError) as error:
            _log.warning("what %s has got is not compared with the notes of it: %s", self.url, error)
            return held
        known = {step: record for one in reversed(held) for step, record in one.records.items()}
        records = CheckpointRecord.by_creation({**known, **there}.values())
        wanted = self._tier.keep.keep(records, time.time())
        if self._tier.when_full == "drop" and there:  # steps before all others were dropped for want of room
            wanted = wanted & {one.step for one in itertools.dropwhile(lambda one: one.step not in there, records)}
        for one in held:
            for step in sorted(one.arrived & wanted - there.keys()):
                _log.warning("step %d is promoted to %s again, which has lost it", step, self.url)
                forget_arrival(one.folders[step].store, self.url)
        return self._sources.look()

    def _wait_for_hosts(self, step: int, waiting: Collection[int]) -> None:
        """Skip steps with parts that will never come: hosts copy in order, and a later, higher step has arrived."""
        self._parts.add(step)
        near = self._tiers.catalogues[0]
        good = {folder.step: folder for folder in self._target.folders() if folder.is_good}
        arrived = functools.cache(lambda arrived: _saved(good[arrived].store, [*good[arrived].entries]))
        for gone in [gone for gone in waiting if gone in self._parts]:
            saved = _saved(near.store_of(gone))
            if saved is None:
                continue
            if gone in good and _is_same(saved, arrived(gone)):  # other hosts have brought the rest meanwhile
                self._parts.discard(gone)
            elif any(_is_later(arrived(other), saved) for other in reversed(good) if other > gone):
                self.refused[gone] = "a host that has a part of it does not bring it"
                _log.warning("step %d is not promoted to %s: %s", gone, self.url, self.refused[gone])
                note_forgone(near.store_of(gone), self.url)
        left = [one for one in waiting if one not in self.refused]
        if left and self._parts.issuperset(left):
            self._parts.clear()
            raise SaveInProgressError(f"{self.url} lacks the parts of other hosts of steps {left}")

    def _copy(self, holder: Catalogue, step: int) -> str | None:
        source, stale = holder.store_of(step), self._tiers.stale_after_seconds
        target = self._target.store_of(step)
        if isinstance(source, HostStore):
            host = self._tiers.host_id()
            return copy_part(source, target, host, stale_after_seconds=stale, pace=self._passed)
        return copy_checkpoint(source, target, stale_after_seconds=stale, pace=self._passed)

    def _promote(self, step: int, holders: Sequence[Held]) -> bool:
        nearest = holders[0]
        if not make_room(self._tiers, self._number, step, needed=nearest.sizes[step]):
            raise StorageError(f"{self.url} is full: step {step} waits until {self._what_makes_room()}")
        source = self._tiers.catalogues[nearest.number]
        with source.reading(step):
            if self._copy(source, step) is None:
                return False
            self._target.published(step)
            for holder in holders:
                self._note(note_arrival, holder, step)
            self._pass_on_notes(nearest.folders[step].entries, step)
        return True

    def _what_makes_room(self) -> str:
        if self._number + 1 < len(self._tiers.tiers):
            return "further tiers have what is there"
        return (
            "its budget is raised (max_bytes), its policy keeps less, or when_full is 'drop': no further tier follows"
        )

    def _give_up(self, step: int, holders: Sequence[Held], error: SupersededError) -> None:
        self._superseded.add(step)
        for holder in holders:
            self._note(note_forgone, holder, step)
        _log.warning("step %d is not promoted to %s: %s", step, self.url, error)
        self._emit("skip", place=f"{self.url}/{self._target.folder_name(step)}")

    def _note(self, write: Callable[[Store, str], None], holder: Held, step: int) -> None:
        self._settled[holder.number, step] = holder.index_entry(step)
        try:
            write(holder.folders[step].store, self.url)
        except OSError as error:
            _log.warning("what became of step %d in %s is not noted: %s", step, self.url, error)

    def _passed(self, count: int) -> None:
        self.progressed_seconds = time.monotonic()
        self._limit(count)

    def _note_refusal(self, step: int, holders: Sequence[Held]) -> None:
        """Note in nearer copies that this tier will not get a step, so that no save waits."""
        for holder in holders:
            with contextlib.suppress(OSError):
                note_refusal(holder.folders[step].store, self.url, self.refused[step])

    def _pass_on_notes(self, entries: Sequence[Entry], step: int) -> None:
        for further in self._tiers.tiers[self._number + 1 :]:
            if has_arrived(entries, further.url):
                note_arrival(self._target.store_of(step), further.url)

    def _report_waiting(self, held: Sequence[Held], waiting: Collection[int]) -> None:
        size = sum(next(one.sizes[step] for one in held if step in one.sizes) for step in waiting)
        if size != self._waiting_bytes:
            self._waiting_bytes = size
            self._emit("waiting", size=size)

    def _report_superseded(self, held: Sequence[Held], waiting: Collection[int]) -> None:
        if held is self._reported:
            return
        self._reported = held
        for one in held:
            for step in sorted(one.folders.keys() - {*waiting} - self._superseded - self.refused.keys()):
                was_wanted = self._tier.keep.keep([one.records[step]], time.time())
                if step in one.waiting or not was_wanted or has_arrived(one.folders[step].entries, self.url):
                    continue
                self._superseded.add(step)
                _log.info("step %d is not promoted to %s: later steps have taken its place", step, self.url)
                self._emit("skip", place=f"{self.url}/{self._target.folder_name(step)}")

    def _emit(self, phase: str, *, place: str | None = None, size: int | None = None, error: str | None = None) -> None:
        state, place = "finished" if error is None else "failed", place or self.url
        event = CheckpointEvent("promote", phase, state, 0, place, bytes=size, error=error, time=time.time())
        installed.emit(event)

    def _tidy_at_last(self) -> None:
        if self._untidied is not None:
            self._tidied_until = 0.0
            self._tidy(self._untidied, running=())

    def _tidy(self, arrived: int, *, running: Collection[int]) -> None:
        begun = time.monotonic()
        self._untidied = arrived
        if begun < self._tidied_until:
            return
        self._retain(arrived, running)
        self._untidied = None
        seconds = time.monotonic() - begun
        self._tidied_until = begun + seconds * (1 + _RARELY) if seconds > _QUICK_SECONDS else 0.0

    def _retain(self, arrived: int, running: Collection[int]) -> None:
        left = retain_in(self._tiers, self._number, arrived)
        self._target.sweep(left, running=running)


def _saved(store: Store, entries: list[Entry] | None = None) -> ManifestInfo | None:
    index = read_current(store, entries).index
    return None if index is None else index.info


def _is_same(one: ManifestInfo, other: ManifestInfo | None) -> bool:
    return other is not None and other.origin == one.origin


def _is_later(one: ManifestInfo | None, other: ManifestInfo) -> bool:
    return one is not None and one.created_ns > other.created_ns
