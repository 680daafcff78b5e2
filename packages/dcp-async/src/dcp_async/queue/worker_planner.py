"""Custom planners with a process saver: the trainer plans, and the worker saves by that plan.

Methods that access values (`set_up_planner`, `create_local_plan`, `resolve_data`) run in the trainer, on the staged
copy; methods that only access plans (`create_global_plan`, `finish_plan`) run in the worker, on a copy of the planner.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcp_async.errors import WorkerError
from dcp_core import MetadataIndex, SavePlan, SavePlanner, StorageMeta, WriteItem
from dcp_core.toolkit import DumpedObject, SavePlannerAbilities, abilities, box_view, set_up_save_planner

__all__ = ["PlannedElsewhere", "StagedPlanner", "pickled", "plan_here"]


@dataclass(frozen=True, slots=True)
class PlannedElsewhere:
    """The local plan that a custom planner made in the trainer, and the names of the staged values of its items."""

    plan: SavePlan
    names: dict[MetadataIndex, str]


def plan_here(
    planner: SavePlanner, state_dict: dict[str, Any], *, is_coordinator: bool
) -> tuple[PlannedElsewhere, dict[str, Any]]:
    """Run a planner's local planning in this process; returns the plan, and the items' values as a flat state dict.

    Raises:
        Exception: Any error of the planner.
    """
    set_up_save_planner(planner, state_dict, None, is_coordinator=is_coordinator)
    plan = planner.create_local_plan()
    names: dict[MetadataIndex, str] = {}
    values: dict[str, Any] = {}
    for number, item in enumerate(plan.items):
        value = planner.resolve_data(item)
        names[item.index] = name = str(number)
        values[name] = DumpedObject(value.getvalue()) if isinstance(value, io.BytesIO) else value
    return PlannedElsewhere(plan, names), values


class StagedPlanner(SavePlanner):
    """Planner of the worker for a local plan and values that the trainer's planner has made.

    Args:
        planner: A copy of the trainer's planner, without values.
        planned: The local plan of that planner.
        values: The staged values, by their names in `planned`.
    """

    def __init__(self, planner: SavePlanner, planned: PlannedElsewhere, values: Mapping[str, Any]) -> None:
        self.stands_for = planner
        self._planned = planned
        self._values = values

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: the original planner has been set up."""

    def create_local_plan(self) -> SavePlan:
        """Return the original planner's local plan."""
        return self._planned.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Any]:
        """Return the global plan that the original planner makes."""
        return self.stands_for.create_global_plan(all_plans)

    def plan_key(self) -> Hashable | None:
        """Return the original planner's plan key; None if it has none."""
        find = abilities(self.stands_for, SavePlannerAbilities).plan_key
        return None if find is None else find()

    def adopt_global_plan(self, plans: list[SavePlan], metadata: Any) -> None:
        """Pass the global plan to the original planner, if that planner has such a method."""
        adopt = abilities(self.stands_for, SavePlannerAbilities).adopt_global_plan
        if adopt is not None:
            adopt(plans, metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as the original planner finishes it."""
        return self.stands_for.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the staged value of an item, or the part of it that this rank writes."""
        name = self._planned.names.get(write_item.index)
        planned = write_item.tensor_data
        if name is not None:
            value = self._values[name]
            if isinstance(value, DumpedObject):
                return io.BytesIO(value.data)
            if planned is None or tuple(value.shape) == tuple(planned.chunk.sizes):
                found: torch.Tensor = value
                return found
        if planned is None:
            raise WorkerError(
                f"{write_item.index.fqn!r} was not in the plan that the trainer made; use the thread saver"
            )
        return self._part(write_item, planned.chunk.offsets, planned.chunk.sizes)

    def _part(self, item: WriteItem, offsets: torch.Size, sizes: torch.Size) -> torch.Tensor:
        """Return this rank's part of a box that several ranks share."""
        for one in self._planned.plan.items:
            data = one.tensor_data
            if one.index.fqn != item.index.fqn or data is None:
                continue
            within = [begin - start for begin, start in zip(offsets, data.chunk.offsets, strict=True)]
            if all(at >= 0 and at + n <= all_ for at, n, all_ in zip(within, sizes, data.chunk.sizes, strict=True)):
                value: torch.Tensor = self._values[self._planned.names[one.index]]
                return box_view(value, within, sizes, key=item.index.fqn)
        raise WorkerError(f"{item.index.fqn!r}: no staged value holds the box at {tuple(offsets)} of {tuple(sizes)}")


def pickled(what: str, value: object) -> bytes:
    """Pickle a value for the worker.

    Raises:
        WorkerError: The value cannot be pickled; the message has the remedy.
    """
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        raise WorkerError(
            f"{what} cannot be given to the saver's process: {type(error).__name__}: {error}. Make it picklable (a "
            "class of an importable module, no open files or locks), or use the thread saver"
        ) from error
