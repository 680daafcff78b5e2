"""Save planner adapters: `StockSavePlanner` wraps stock's planner, `SavePlannerForStock` ours.

Source: torch 2.13 `torch.distributed.checkpoint.planner.SavePlanner` (contract).
"""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, metadata, planner

from dcp_bridge.calls import stock_errors
from dcp_bridge.own_records import own_save_plan, own_storage_meta
from dcp_bridge.stock_records import stock_metadata, stock_save_plan, stock_storage_meta, stock_write_item
from dcp_bridge.wrapper import Delegating
from dcp_core import Metadata, SavePlan, SavePlanner, StorageMeta, WriteItem
from dcp_core.records.foreign_records import as_metadata, as_write_item
from dcp_core.records.protocols import set_up_save_planner

_OF_A_SAVE = ("state_dict", "plan", "global_plan", "metadata", "storage_meta")


class StockSavePlanner(Delegating[planner.SavePlanner], SavePlanner):
    """Save planner that delegates to a planner of stock, with stock's checks only."""

    def without_values(self) -> StockSavePlanner:
        """Return a copy without values, if the wrapped planner derives from stock's default."""
        if not isinstance(self.wrapped, default_planner.DefaultSavePlanner):
            return self
        twin = copy.copy(self)
        twin.wrapped = copy.copy(self.wrapped)
        vars(twin.wrapped).update({name: None for name in _OF_A_SAVE if name in vars(twin.wrapped)})
        return twin

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Set up the wrapped planner."""
        with stock_errors("set_up_planner"):
            meta: Any = stock_storage_meta(storage_meta)
            set_up_save_planner(self.wrapped, state_dict, meta, is_coordinator=is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Return its local plan."""
        with stock_errors("create_local_plan"):
            return own_save_plan(self.wrapped.create_local_plan())

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return its global plans and metadata."""
        with stock_errors("create_global_plan"):
            plans, found = self.wrapped.create_global_plan([stock_save_plan(plan) for plan in all_plans])
        return [own_save_plan(plan) for plan in plans], as_metadata(found)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return its final plan."""
        with stock_errors("finish_plan"):
            return own_save_plan(self.wrapped.finish_plan(stock_save_plan(new_plan)))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return its data for an item."""
        with stock_errors("resolve_data"):
            return self.wrapped.resolve_data(stock_write_item(write_item))


class SavePlannerForStock(Delegating[SavePlanner], planner.SavePlanner):
    """Save planner of stock that delegates to our planner.

    Tied values are written under each name: stock's metadata has no aliases.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: metadata.StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set up the wrapped planner."""
        meta = own_storage_meta(storage_meta)
        set_up_save_planner(self.wrapped, state_dict, meta, is_coordinator=is_coordinator)

    def create_local_plan(self) -> planner.SavePlan:
        """Return its local plan."""
        return stock_save_plan(replace(self.wrapped.create_local_plan(), aliases=None))

    def create_global_plan(self, all_plans: list[planner.SavePlan]) -> tuple[list[planner.SavePlan], metadata.Metadata]:
        """Return its global plans and metadata."""
        plans, found = self.wrapped.create_global_plan([own_save_plan(plan) for plan in all_plans])
        return [stock_save_plan(plan) for plan in plans], stock_metadata(found)

    def finish_plan(self, new_plan: planner.SavePlan) -> planner.SavePlan:
        """Return its final plan."""
        return stock_save_plan(self.wrapped.finish_plan(own_save_plan(new_plan)))

    def resolve_data(self, write_item: planner.WriteItem) -> torch.Tensor | io.BytesIO:
        """Return its data for an item."""
        return self.wrapped.resolve_data(as_write_item(write_item))
