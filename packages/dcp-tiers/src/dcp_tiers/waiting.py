"""Checkpoints that wait for their promotion: what a further tier must still get from a nearer one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from dcp_io import Catalogue, by_creation
from dcp_tiers.arrivals import has_arrived
from dcp_tiers.tier import Tier

__all__ = ["TieredRoot", "steps_to_send"]


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


def steps_to_send(tiers: TieredRoot, number: int, holder: int) -> set[int]:
    """Return the steps in one tier that a further tier must still get, by the further tier's policy.

    Only the nearer tier is asked; a far one may be away.

    Args:
        tiers: The tiers.
        number: Number of the further tier.
        holder: Number of the nearer tier.
    """
    catalogue = tiers.catalogues[holder]
    folders = [folder for folder in catalogue.folders() if folder.is_good]
    wanted = tiers.tiers[number].keep.keep(by_creation(catalogue.records(folders)), time.time())
    url = tiers.tiers[number].url
    return {
        folder.step
        for folder in folders
        if folder.step in wanted and not has_arrived(folder.store, folder.entries, url)
    }
