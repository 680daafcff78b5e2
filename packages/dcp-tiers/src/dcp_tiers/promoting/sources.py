"""`Sources`: what the nearer tiers have for a further one. A middle tier that does not answer holds nothing up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dcp_io import CheckpointRecord, Entry, StepFolder, call_in_time
from dcp_manifest import METADATA_NAME, library_logger
from dcp_tiers.arrivals import arrival_is_noted
from dcp_tiers.waiting import TieredRoot, select_waiting

__all__ = ["Held", "Sources"]

_log = library_logger(__name__)

# Listing 10,000 checkpoints takes a second: then it is done for every twentieth second of work, not for each step.
_QUICK_SECONDS, _REUSED = 0.05, 20.0


@dataclass(frozen=True, slots=True)
class Held:
    """Undamaged checkpoints in one nearer tier."""

    number: int
    """Number of the tier."""
    folders: dict[int, StepFolder]
    """Step → its folder."""
    records: dict[int, CheckpointRecord]
    """Step → its record."""
    waiting: frozenset[int]
    """Steps that the further tier must still get."""
    arrived: frozenset[int]
    """Steps with a note that the further tier has got them."""
    sizes: dict[int, int]
    """Step → bytes of all files of the checkpoint."""

    def index_entry(self, step: int) -> Entry | None:
        """Return the entry of a checkpoint's index in the listing."""
        return next((entry for entry in self.folders[step].entries if entry.name == METADATA_NAME), None)


class Sources:
    """Listings of the tiers before one tier.

    Args:
        tiers: The tiers of the run.
        number: Number of the tier that gets the checkpoints.

    Ranks: one process, one thread.
    """

    def __init__(self, tiers: TieredRoot, number: int) -> None:
        self._tiers = tiers
        self._number = number
        self._held: list[Held] = []
        self._until = 0.0
        self._silent: set[int] = set()

    def look(self, *, afresh: bool = True) -> list[Held]:
        """Return what each nearer tier has, the nearest first, without the middle tiers that cannot be read now.

        Args:
            afresh: Whether to list in any case; otherwise the last result is returned if listing takes long.

        Raises:
            OSError: The first tier cannot be read.
        """
        begun = time.monotonic()
        if not afresh and begun < self._until:
            return self._held
        middle = [self._ask(holder) for holder in range(1, self._number)]
        self._held = [self._list(0), *(held for held in middle if held is not None)]
        seconds = time.monotonic() - begun
        self._until = begun + seconds * (1 + _REUSED) if seconds > _QUICK_SECONDS else 0.0
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
        """List a middle tier; None if it fails, or does not answer in time: the first tier has most of it, too."""
        try:
            held = call_in_time(self._tiers.tiers[holder].url, partial(self._list, holder))
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
