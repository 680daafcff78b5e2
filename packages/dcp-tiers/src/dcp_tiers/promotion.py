"""Promotion to one tier: which steps wait, in which order they go, and what is kept there. `copying` copies one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from dcp_hooks import CheckpointEvent, installed
from dcp_io import Store, by_creation, keeps_all
from dcp_manifest import (
    CorruptCheckpointError,
    DcpError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
    library_logger,
)
from dcp_tiers.arrivals import has_arrived, note_arrival
from dcp_tiers.copying import Pace, copy_checkpoint
from dcp_tiers.errors import PromotionError
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
        self._pace = Pace(self._tier.rate_bytes_per_second)
        self._described = False
        self._superseded: set[int] = set()
        self.refused: dict[int, str] = {}
        """Steps that cannot be promoted, and the reasons."""
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
        if not waiting:
            return False
        if not self._described:
            self._tiers.write_to(self._number)
            self._described = True
        step = waiting[0]
        try:
            self._promote(step)
        except _REFUSED as error:
            self.refused[step] = str(error)
            _log.error("step %d is not promoted to %s: %s", step, self.url, error)
            return True
        self._retain(step, running=waiting[1:])
        return True

    def _promote(self, step: int) -> None:
        holders = [catalogue for catalogue in self._tiers.catalogues[: self._number] if catalogue.is_good(step)]
        if not holders:
            return
        target = self._tiers.catalogues[self._number]
        with holders[0].reading(step):
            save_id = copy_checkpoint(
                holders[0].store_of(step),
                target.store_of(step),
                stale_after_seconds=self._tiers.stale_after_seconds,
                pace=self._pace,
            )
            target.published(step)
            for holder in holders:
                note_arrival(holder.store_of(step), self.url, save_id)
            self._pass_on_notes(holders[0].store_of(step), target.store_of(step), save_id)

    def _pass_on_notes(self, holder: Store, target: Store, save_id: str) -> None:
        """Note in the new copy to which tiers beyond this one the checkpoint has been promoted already."""
        entries = holder.list()
        for further in self._tiers.tiers[self._number + 1 :]:
            if has_arrived(holder, entries, further.url):
                note_arrival(target, further.url, save_id)

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
