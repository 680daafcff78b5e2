"""Save planner adapters: `StockSavePlanner` takes a planner of stock, `SavePlannerForStock` a planner of this project.

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
from dcp_core.toolkit import as_metadata, as_write_item, set_up_save_planner

__all__ = ["SavePlannerForStock", "StockSavePlanner"]

_OF_A_SAVE = ("state_dict", "plan", "global_plan", "metadata", "storage_meta")


class StockSavePlanner(Delegating[planner.SavePlanner], SavePlanner):
    """Save planner that delegates to a planner of `torch.distributed.checkpoint`, including overridden methods.

    The wrapped planner assigns replicated values to ranks, and makes all checks; this project's checks are not made.

    Example:
        ```python
        import torch
        import torch.distributed.checkpoint as stock
        from dcp_bridge import StockSavePlanner
        from dcp_core import save

        planner = StockSavePlanner(stock.DefaultSavePlanner())
        save({"weight": torch.ones(3)}, checkpoint_id="step-1", planner=planner)
        ```
    """

    def __getstate__(self) -> dict[str, Any]:
        # A copy for another process plans other saves: values stay here.
        twin = self.wrapped
        if isinstance(twin, default_planner.DefaultSavePlanner):
            twin = copy.copy(twin)
            vars(twin).update({name: None for name in _OF_A_SAVE if name in vars(twin)})
        return {**vars(self), "wrapped": twin}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Set up the wrapped planner for a state dict; `storage_meta` is passed if its method takes it."""
        with stock_errors("set_up_planner"):
            meta: Any = stock_storage_meta(storage_meta)
            set_up_save_planner(self.wrapped, state_dict, meta, is_coordinator=is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Return the wrapped planner's local save plan."""
        with stock_errors("create_local_plan"):
            return own_save_plan(self.wrapped.create_local_plan())

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Pass the local plans of all ranks to the wrapped planner; return its plans, one per rank, and metadata."""
        with stock_errors("create_global_plan"):
            plans, found = self.wrapped.create_global_plan([stock_save_plan(plan) for plan in all_plans])
        return [own_save_plan(plan) for plan in plans], as_metadata(found)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the wrapped planner's final save plan of this rank."""
        with stock_errors("finish_plan"):
            return own_save_plan(self.wrapped.finish_plan(stock_save_plan(new_plan)))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor or bytes that the wrapped planner returns for an item."""
        with stock_errors("resolve_data"):
            return self.wrapped.resolve_data(stock_write_item(write_item))


class SavePlannerForStock(Delegating[SavePlanner], planner.SavePlanner):
    """Save planner of `torch.distributed.checkpoint` that delegates to a planner of this project.

    Tied values are written under each of their names: stock's metadata has no aliases.

    Example:
        ```python
        import torch
        import torch.distributed.checkpoint as stock
        from dcp_bridge import SavePlannerForStock
        from dcp_core import DefaultSavePlanner

        planner = SavePlannerForStock(DefaultSavePlanner(on_divergence="error"))
        stock.save({"weight": torch.ones(3)}, checkpoint_id="step-1", planner=planner)
        ```
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: metadata.StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set up the wrapped planner for a state dict."""
        meta = own_storage_meta(storage_meta)
        set_up_save_planner(self.wrapped, state_dict, meta, is_coordinator=is_coordinator)

    def create_local_plan(self) -> planner.SavePlan:
        """Return the wrapped planner's local save plan, converted to a plan of stock."""
        return stock_save_plan(replace(self.wrapped.create_local_plan(), aliases=None))

    def create_global_plan(self, all_plans: list[planner.SavePlan]) -> tuple[list[planner.SavePlan], metadata.Metadata]:
        """Pass the local plans of all ranks to the wrapped planner; return its plans, one per rank, and its metadata.

        Plans and metadata are converted to stock's records.
        """
        plans, found = self.wrapped.create_global_plan([own_save_plan(plan) for plan in all_plans])
        return [stock_save_plan(plan) for plan in plans], stock_metadata(found)

    def finish_plan(self, new_plan: planner.SavePlan) -> planner.SavePlan:
        """Return the wrapped planner's final save plan of this rank, converted to a plan of stock."""
        return stock_save_plan(self.wrapped.finish_plan(own_save_plan(new_plan)))

    def resolve_data(self, write_item: planner.WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor or bytes that the wrapped planner returns for an item."""
        return self.wrapped.resolve_data(as_write_item(write_item))
