"""Load planner adapters: `StockLoadPlanner` wraps stock's planner, `LoadPlannerForStock` ours.

Source: torch 2.13 `torch.distributed.checkpoint.planner.LoadPlanner` (contract).
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint import metadata, planner

from dcp_bridge.calls import stock_errors
from dcp_bridge.own_records import own_load_plan, own_read_item
from dcp_bridge.stock_records import stock_load_plan, stock_metadata, stock_read_item
from dcp_bridge.wrapper import Delegating
from dcp_core import CorruptCheckpointError, LoadPlan, LoadPlanner, Metadata, ReadItem, UnsafeCheckpointError
from dcp_core.objects.object_bytes import dump_object, load_object, scan
from dcp_core.records.foreign_records import as_metadata


class StockLoadPlanner(Delegating[planner.LoadPlanner], LoadPlanner):
    """Load planner that delegates to a planner of stock, with stock's checks only: without ours of dtypes and holes."""

    def __init__(self, wrapped: planner.LoadPlanner, *, trust_objects: bool = False) -> None:
        super().__init__(wrapped)
        self._trust_objects = trust_objects

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Set up the wrapped planner."""
        found = None if metadata is None else stock_metadata(metadata)
        with stock_errors("set_up_planner"):
            self.wrapped.set_up_planner(state_dict, found, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Return its local plan."""
        with stock_errors("create_local_plan"):
            return own_load_plan(self.wrapped.create_local_plan())

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return its global plans."""
        with stock_errors("create_global_plan"):
            plans = self.wrapped.create_global_plan([stock_load_plan(plan) for plan in global_plan])
        return [own_load_plan(plan) for plan in plans]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return its final plan."""
        with stock_errors("finish_plan"):
            return own_load_plan(self.wrapped.finish_plan(stock_load_plan(central_plan)))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Pass on a stored object if `dcp_core`'s allow-list permits it, or with `trust_objects`.

        Raises:
            UnsafeCheckpointError: The object names other classes or functions (see the message), or is not a
                `torch.save` archive.
        """
        if not self._trust_objects:
            value = _harmless(read_item.storage_index.fqn, value.getvalue())
        with stock_errors("load_bytes"):
            self.wrapped.load_bytes(stock_read_item(read_item), value)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Return its buffer for an object."""
        return self.wrapped.resolve_bytes(stock_read_item(read_item))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return its tensor for an item."""
        return self.wrapped.resolve_tensor(stock_read_item(read_item))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Report that a tensor was read."""
        self.wrapped.commit_tensor(stock_read_item(read_item), tensor)


class LoadPlannerForStock(Delegating[LoadPlanner], planner.LoadPlanner):
    """Load planner of stock that delegates to our planner."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: metadata.Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set up the wrapped planner."""
        self.wrapped.set_up_planner(state_dict, None if metadata is None else as_metadata(metadata), is_coordinator)

    def create_local_plan(self) -> planner.LoadPlan:
        """Return its local plan."""
        return stock_load_plan(self.wrapped.create_local_plan())

    def create_global_plan(self, global_plan: list[planner.LoadPlan]) -> list[planner.LoadPlan]:
        """Return its global plans."""
        plans = self.wrapped.create_global_plan([own_load_plan(plan) for plan in global_plan])
        return [stock_load_plan(plan) for plan in plans]

    def finish_plan(self, central_plan: planner.LoadPlan) -> planner.LoadPlan:
        """Return its final plan."""
        return stock_load_plan(self.wrapped.finish_plan(own_load_plan(central_plan)))

    def load_bytes(self, read_item: planner.ReadItem, value: io.BytesIO) -> None:
        """Pass on a stored object."""
        self.wrapped.load_bytes(own_read_item(read_item), value)

    def resolve_bytes(self, read_item: planner.ReadItem) -> io.BytesIO:
        """Return its buffer for an object."""
        return self.wrapped.resolve_bytes(own_read_item(read_item))

    def resolve_tensor(self, read_item: planner.ReadItem) -> torch.Tensor:
        """Return its tensor for an item."""
        return self.wrapped.resolve_tensor(own_read_item(read_item))

    def commit_tensor(self, read_item: planner.ReadItem, tensor: torch.Tensor) -> None:
        """Report that a tensor was read."""
        self.wrapped.commit_tensor(own_read_item(read_item), tensor)


def _harmless(key: str, data: bytes) -> io.BytesIO:
    """Re-pickle an object that our allow-list loaded; stock's unpickler may read untrusted bytes differently."""
    remedy = (
        "use dcp_core.DefaultLoadPlanner, or, if you trust the checkpoint, trust_objects=True with from_stock(planner) "
        "or to_stock(reader)"
    )
    try:
        return io.BytesIO(dump_object(load_object(data, key=key), key=key))
    except CorruptCheckpointError as error:
        raise UnsafeCheckpointError(
            f"the object {key!r} is not in torch.save's form, so its code cannot be checked; {remedy}"
        ) from error
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(
            f"the object {key!r} names {', '.join(scan(data))}, which a planner of torch.distributed.checkpoint would "
            f"unpickle without restriction; {remedy}"
        ) from error
