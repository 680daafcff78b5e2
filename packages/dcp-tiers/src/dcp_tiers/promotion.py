"""Promotion to one tier: which steps wait, in which order they go, and what is kept there. `copying` copies one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection

from dcp_hooks import CheckpointEvent, installed
from dcp_io import Catalogue, HostStore, SaveInProgressError, Store, by_creation, keeps_all
from dcp_manifest import (
    CorruptCheckpointError,
    DcpError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
    library_logger,
)
from dcp_tiers.arrivals import has_arrived, note_arrival, note_refusal
from dcp_tiers.budget import make_room
from dcp_tiers.copying.copy_checkpoint import Pace, copy_checkpoint
from dcp_tiers.copying.copy_part import copy_part
from dcp_tiers.errors import PromotionError, TierFullError
from dcp_tiers.tiers import Tiers
from dcp_tiers.waiting import steps_to_send

__all__ = ["Promotion"]

_log = library_logger(__name__)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 60.0
# Trying again helps with none of these.
_REFUSED = (CorruptCheckpointError, PromotionError, UnsafeCheckpointError, UnsupportedFormatError)


class Promotion:
    """Promotion of checkpoints from the nearer tiers to one tier, by ascending step.

    Args:
        tiers: The tiers of the run.
        number: Number of the tier that gets the checkpoints, at least 1.

    Ranks: one process; a second one waits, or is refused by the lease in the tier.
    """

    def __init__(self, tiers: Tiers, number: int) -> None:
        self._tiers = tiers
        self._number = number
        self._tier = tiers.tiers[number]
        self._limit = Pace(self._tier.rate_bytes_per_second)
        self._described = False
        self._superseded: set[int] = set()
        self._parts: set[int] = set()
        """Steps of which the tier has this host's part, and lacks those of other hosts."""
        self._waiting_bytes: int | None = None
        self.refused: dict[int, str] = {}
        """Steps that cannot be promoted, and the reasons."""
        self.progressed_seconds = time.monotonic()
        """Time, on the monotonic clock, at which bytes have passed or nothing waited last."""
        self.problem: str | None = None
        """Description of the last failure, if the storage does not answer; None after a success."""

    @property
    def url(self) -> str:
        """Path or URI of the tier that gets the checkpoints."""
        return self._tier.url

    def waiting(self) -> list[int]:
        """Return the steps that the tier must still get, ascending."""
        nearer = range(self._number)
        return sorted(
            set().union(*(steps_to_send(self._tiers, self._number, holder) for holder in nearer)) - {*self.refused}
        )

    def run(self, pause: Callable[[float], bool]) -> bool:
        """Promote until nothing waits; failures of the storages are tried again after growing pauses.

        Args:
            pause: Function that waits a number of seconds, and returns False to give up.

        Returns:
            Whether nothing waits; False if `pause` gave up.
        """
        seconds = _FIRST_PAUSE_SECONDS
        while True:
            try:
                if not self.promote_next():
                    self.progressed_seconds = time.monotonic()
                    self.problem = None
                    return True
            except (OSError, DcpError) as error:
                self.problem = f"{type(error).__name__}: {error}"
                _log.warning("promotion to %s is tried again in %.1f s: %s", self.url, seconds, self.problem)
                if not pause(seconds):
                    return False
                seconds = min(2 * seconds, _LONGEST_PAUSE_SECONDS)
            else:
                seconds = _FIRST_PAUSE_SECONDS

    def promote_next(self) -> bool:
        """Promote the lowest step that waits; returns False if none does.

        A step that cannot be promoted is reported as an event, noted in `refused`, and not tried again.

        Raises:
            OSError, DcpError: A storage failed, the step is being saved or has just been removed: try again.
        """
        waiting = self.waiting()
        self._report_superseded(waiting)
        self._report_waiting(waiting)
        if not waiting:
            return False
        if not self._described:
            self._tiers.write_to(self._number)
            self._described = True
        step = next((step for step in waiting if step not in self._parts), waiting[0])
        try:
            if not self._promote(step):
                self._wait_for_hosts(step, waiting)
                return True
        except _REFUSED as error:
            self.refused[step] = str(error)
            self._note_refusal(step)
            _log.error("step %d is not promoted to %s: %s", step, self.url, error)
            return True
        self._parts.discard(step)
        self._retain(step, running=[other for other in waiting if other != step])
        return True

    def _wait_for_hosts(self, step: int, waiting: Collection[int]) -> None:
        """Note that other hosts' parts of a step are lacking; give up steps whose parts will not come.

        Each host brings its parts in ascending order. So what a step lacks after a later one is complete is on a host
        that does not take part any more.
        """
        self._parts.add(step)
        target, near = self._tiers.catalogues[self._number], self._tiers.catalogues[0]
        arrived = max((folder.step for folder in target.folders() if folder.is_good), default=-1)
        for gone in [gone for gone in waiting if gone in self._parts and gone < arrived]:
            self.refused[gone] = "a host that has a part of it does not bring it"
            _log.warning("step %d is not promoted to %s: %s", gone, self.url, self.refused[gone])
            note_arrival(near.store_of(gone), self.url, "")
        left = [one for one in waiting if one not in self.refused]
        if left and self._parts.issuperset(left):
            self._parts.clear()
            raise SaveInProgressError(f"{self.url} lacks the parts of other hosts of steps {left}")

    def _copy(self, holder: Catalogue, target: Catalogue, step: int) -> str | None:
        source, stale = holder.store_of(step), self._tiers.stale_after_seconds
        if isinstance(source, HostStore):
            host = self._tiers.host_id()
            return copy_part(source, target.store_of(step), host, stale_after_seconds=stale, pace=self._passed)
        return copy_checkpoint(source, target.store_of(step), stale_after_seconds=stale, pace=self._passed)

    def _promote(self, step: int) -> bool:
        """Copy a step, or this host's part of it; returns False if the tier lacks other hosts' parts."""
        holders = [catalogue for catalogue in self._tiers.catalogues[: self._number] if catalogue.is_good(step)]
        if not holders:
            return True
        target = self._tiers.catalogues[self._number]
        size = sum(entry.bytes for entry in holders[0].store_of(step).list())
        if not make_room(self._tiers, self._number, step, needed=size):
            raise TierFullError(f"{self.url} is full: step {step} waits until further tiers have what is there")
        with holders[0].reading(step):
            save_id = self._copy(holders[0], target, step)
            if save_id is None:
                return False
            target.published(step)
            for holder in holders:
                note_arrival(holder.store_of(step), self.url, save_id)
            self._pass_on_notes(holders[0].store_of(step), target.store_of(step), save_id)
        return True

    def _passed(self, count: int) -> None:
        self.progressed_seconds = time.monotonic()
        self._limit(count)

    def _note_refusal(self, step: int) -> None:
        """Note beside the nearer copies that this tier will not get a step: no save waits for it."""
        for catalogue in self._tiers.catalogues[: self._number]:
            with contextlib.suppress(OSError):
                note_refusal(catalogue.store_of(step), self.url, self.refused[step])

    def _pass_on_notes(self, holder: Store, target: Store, save_id: str) -> None:
        """Note in the new copy to which tiers beyond this one the checkpoint has been promoted already."""
        entries = holder.list()
        for further in self._tiers.tiers[self._number + 1 :]:
            if has_arrived(holder, entries, further.url):
                note_arrival(target, further.url, save_id)

    def _report_waiting(self, waiting: Collection[int]) -> None:
        """Emit an event with the number of bytes that the tier must still get, whenever it has changed."""
        sizes = {
            folder.step: sum(entry.bytes for entry in folder.entries)
            for catalogue in reversed(self._tiers.catalogues[: self._number])
            for folder in (catalogue.folders() if waiting else ())
            if folder.step in waiting
        }
        size = sum(sizes.values())
        if size != self._waiting_bytes:
            self._waiting_bytes = size
            event = CheckpointEvent("promote", "waiting", "finished", 0, self.url, bytes=size, time=time.time())
            installed.emit(event)

    def _report_superseded(self, waiting: Collection[int]) -> None:
        """Emit an event for each step that the tier's policy wanted once, and does not want any more."""
        for holder in self._tiers.catalogues[: self._number]:
            folders = [folder for folder in holder.folders() if folder.is_good]
            records = {record.step: record for record in holder.records(folders)}
            for folder in folders:
                step = folder.step
                if step in waiting or step in self._superseded or step in self.refused:
                    continue
                was_wanted = self._tier.keep.keep([records[step]], time.time())
                if not was_wanted or has_arrived(folder.store, folder.entries, self.url):
                    continue
                self._superseded.add(step)
                place = f"{self.url}/{holder.folder_name(step)}"
                _log.info("step %d is not promoted to %s: later steps have taken its place", step, self.url)
                installed.emit(CheckpointEvent("promote", "skip", "finished", 0, place, time=time.time()))

    def _retain(self, arrived: int, *, running: Collection[int]) -> None:
        """Remove what the tier's policy does not keep, and leftovers of interrupted copies that nobody will finish."""
        catalogue = self._tiers.catalogues[self._number]
        folders = catalogue.folders()
        records = by_creation(catalogue.records(folders))
        good = [record for record in records if record.quarantined is None]
        now, policy = time.time(), self._tier.keep
        if not keeps_all(policy):
            keep = {arrived, *policy.keep(good, now), *(record.step for record in good[-1:])}
            keep |= {record.step for record in records if record.quarantined is not None} & policy.keep(records, now)
            for further in range(self._number + 1, len(self._tiers.tiers)):
                keep |= steps_to_send(self._tiers, further, self._number)
            removed = [record.step for record in records if record.step not in keep and catalogue.remove(record.step)]
            folders = [folder for folder in folders if folder.step not in removed]
        catalogue.sweep(folders, running=running)
