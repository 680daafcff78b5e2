"""Checkpoints that wait for their promotion: what a further tier must still get from a nearer one, and a policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from dcp_io import Catalogue, CheckpointRecord, KeepPolicy, StepFolder, by_creation
from dcp_tiers.arrivals import has_arrived, was_refused
from dcp_tiers.tier import Tier

__all__ = ["KeepWaiting", "TieredRoot", "select_waiting", "steps_that_can_come", "steps_to_send"]


class TieredRoot(Protocol):
    """Protocol of what `steps_to_send` needs of `Tiers`."""

    @property
    def tiers(self) -> Sequence[Tier]:
        """The tiers, nearest first."""
        ...

    @property
    def catalogues(self) -> Sequence[Catalogue]:
        """Catalogue of each tier."""
        ...


def steps_to_send(tiers: TieredRoot, number: int, holder: int, folders: Sequence[StepFolder] | None = None) -> set[int]:
    """Return the steps in one tier that a further tier must still get, by the further tier's policy.

    Only the nearer tier is asked; a far one may be away.

    Args:
        tiers: The tiers.
        number: Number of the further tier.
        holder: Number of the nearer tier.
        folders: Folders of the nearer tier, if the caller has a fresh listing; None lists them.
    """
    catalogue = tiers.catalogues[holder]
    good = [folder for folder in (catalogue.folders() if folders is None else folders) if folder.is_good]
    return select_waiting(tiers.tiers[number], good, catalogue.records(good))


def select_waiting(tier: Tier, good: Sequence[StepFolder], records: Sequence[CheckpointRecord]) -> set[int]:
    """Return the steps that a tier must still get of undamaged checkpoints in a nearer one, whose records are given."""
    wanted = tier.keep.keep(by_creation(records), time.time())
    return {folder.step for folder in good if folder.step in wanted and not has_arrived(folder.entries, tier.url)}


def steps_that_can_come(tiers: TieredRoot) -> set[int]:
    """Return the steps in the first tier that some further one must still get and has not refused."""
    folders = tiers.catalogues[0].folders()
    return {
        folder.step
        for number in range(1, len(tiers.tiers))
        for waiting in (steps_to_send(tiers, number, 0, folders),)
        for folder in folders
        if folder.step in waiting and not was_refused(folder.entries, tiers.tiers[number].url)
    }


class KeepWaiting(KeepPolicy):
    """Policy for the first tier that keeps each checkpoint that a further tier must still get.

    Combined with another policy, it keeps a slow or absent tier from losing checkpoints: what that tier's own policy
    would drop anyway is not kept for it. Only the first tier is asked, so that retention waits for no far storage.

    Args:
        tiers: The tiers of the run; the policy is for the first of them.

    Example:
        ```python
        from dcp_io import KeepLast
        from dcp_manager import CheckpointManager
        from dcp_tiers import KeepWaiting, Tier, Tiers
        from dcp_tiers.promote import promote

        tiers = Tiers([Tier("near"), Tier("far")])
        with CheckpointManager("near", keep_policy=KeepLast(1) | KeepWaiting(tiers)) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"step": step})
            assert len(manager.checkpoints()) == 3  # the far tier has none of them yet
            promote(tiers)
            manager.save(4, {"step": 4})
            assert [record.step for record in manager.checkpoints()] == [4]
        ```
    """

    def __init__(self, tiers: TieredRoot) -> None:
        self._tiers = tiers

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the steps that some further tier must still get."""
        del records, now_seconds
        further = range(1, len(self._tiers.tiers))
        folders = self._tiers.catalogues[0].folders() if further else ()
        return set().union(*(steps_to_send(self._tiers, number, 0, folders) for number in further))
