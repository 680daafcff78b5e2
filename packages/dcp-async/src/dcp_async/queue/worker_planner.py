"""Custom save planners with a process saver: local planning in the trainer, global planning in the worker process.

Methods that access tensors (`set_up_planner`, `create_local_plan`, `resolve_data`) run in the trainer, on the staged
copy; methods that access only plans (`create_global_plan`, `finish_plan`) run in the worker, on a copy of the planner.
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
    """The local plan that a custom planner made in the trainer.

    Attributes:
        plan: The local plan.
        names: `index` of each item in the plan → name under which the data of this item is staged.
    """

    plan: SavePlan
    names: dict[MetadataIndex, str]


def plan_here(
    planner: SavePlanner, state_dict: dict[str, Any], *, is_coordinator: bool
) -> tuple[PlannedElsewhere, dict[str, Any]]:
    """Run a custom planner's local planning in this process.

    Args:
        planner: The custom planner.
        state_dict: Staged state dict to plan.
        is_coordinator: Whether this rank is the coordinator.

    Returns:
        The local plan, and the data of its items as a flat state dict: name → tensor or serialized object.

    Raises:
        Exception: The planner failed.
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
    """Save planner of the worker process, which uses the local plan that a custom planner has made in the trainer.

    Args:
        planner: Copy of the custom planner, without tensors.
        planned: Local plan of the custom planner.
        values: Staged tensors and objects, by their names in `planned`.
    """

    def __init__(self, planner: SavePlanner, planned: PlannedElsewhere, values: Mapping[str, Any]) -> None:
        self.stands_for = planner
        self._planned = planned
        self._values = values

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: the custom planner was set up in the trainer."""

    def create_local_plan(self) -> SavePlan:
        """Return the local plan that the custom planner made in the trainer."""
        return self._planned.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Any]:
        """Return the final plans and the metadata from the copy of the custom planner. Called on the coordinator."""
        return self.stands_for.create_global_plan(all_plans)

    def plan_key(self) -> Hashable | None:
        """Return the custom planner's plan key; None if the planner has no `plan_key`."""
        find = abilities(self.stands_for, SavePlannerAbilities).plan_key
        return None if find is None else find()

    def adopt_global_plan(self, plans: list[SavePlan], metadata: Any) -> None:
        """Pass a reused global plan to the custom planner; do nothing if it has no `adopt_global_plan`."""
        adopt = abilities(self.stands_for, SavePlannerAbilities).adopt_global_plan
        if adopt is not None:
            adopt(plans, metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's plan after the custom planner's `finish_plan`."""
        return self.stands_for.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the staged tensor (only the chunk of the item) or serialized object that an item writes."""
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
    """Pickle an object for the worker process.

    Args:
        what: Name of the object for the error message.
        value: Object to pickle.

    Raises:
        WorkerError: The object cannot be pickled; the message names a remedy.
    """
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        raise WorkerError(
            f"{what} cannot be given to the saver's process: {type(error).__name__}: {error}. Make it picklable (a "
            "class of an importable module, no open files or locks), or use the thread saver"
        ) from error
