"""Load of one step for a restore: the call of `dcp_core.load` with the manager's storage and ranks."""

from __future__ import annotations

from typing import Any

from dcp_core import LoadPlanner, LoadReport, load
from dcp_io import Catalogue
from dcp_manager.places import Places
from dcp_manager.root_places import RootPlaces
from dcp_manager.together import Ranks

__all__ = ["load_from"]


def load_from(
    places: Places,
    where: RootPlaces,
    ranks: Ranks,
    state: dict[str, Any],
    catalogue: Catalogue,
    step: int,
    *,
    planner: LoadPlanner | None,
    cooperative: bool | None,
) -> LoadReport:
    """Load a step from the place of a catalogue, and return the report.

    Args:
        places: Storages of checkpoint ids.
        where: Places of the root.
        ranks: The ranks that load.
        state: The template, filled in place.
        catalogue: Catalogue of the place.
        step: The step.
        planner: Load planner; see `dcp_core.load`.
        cooperative: Whether the ranks read together; see `dcp_core.load`.

    Ranks: every rank; collective.
    """
    return load(
        state,
        **places.to_read(where.reading_id(catalogue, step)),
        **ranks.arguments,
        planner=planner,
        timeout_seconds=ranks.timeout_seconds,
        cooperative=cooperative,
    )
