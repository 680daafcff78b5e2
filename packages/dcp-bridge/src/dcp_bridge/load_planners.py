"""Load planner adapters: `StockLoadPlanner` takes a planner of stock, `LoadPlannerForStock` a planner of this project.

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
from dcp_core.toolkit import as_metadata, dump_object, load_object, scan

__all__ = ["LoadPlannerForStock", "StockLoadPlanner"]


class StockLoadPlanner(Delegating[planner.LoadPlanner], LoadPlanner):
    """Load planner that delegates to a planner of `torch.distributed.checkpoint`, including overridden methods.

    Args:
        wrapped: Planner of stock.
        trust_objects: Whether stored objects are passed to the planner without a check. Stock's planner unpickles them
            without restriction, which runs any code in them.

    The wrapped planner makes all checks; checks of this project that stock lacks (dtypes, holes in tensors) are not
    made.

    Example:
        ```python
        import torch
        import torch.distributed.checkpoint as stock
        from dcp_bridge import StockLoadPlanner
        from dcp_core import load, save

        save({"weight": torch.ones(3)}, checkpoint_id="step-1")
        planner = StockLoadPlanner(stock.DefaultLoadPlanner(allow_partial_load=True))
        load({"weight": torch.zeros(3), "bias": torch.zeros(3)}, checkpoint_id="step-1", planner=planner)
        ```
    """

    def __init__(self, wrapped: planner.LoadPlanner, *, trust_objects: bool = False) -> None:
        super().__init__(wrapped)
        self._trust_objects = trust_objects

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Set up the wrapped planner for a template and the checkpoint's metadata."""
        found = None if metadata is None else stock_metadata(metadata)
        with stock_errors("set_up_planner"):
            self.wrapped.set_up_planner(state_dict, found, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Return the wrapped planner's local load plan."""
        with stock_errors("create_local_plan"):
            return own_load_plan(self.wrapped.create_local_plan())

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Pass the local plans of all ranks to the wrapped planner; return its global load plan, one plan per rank."""
        with stock_errors("create_global_plan"):
            plans = self.wrapped.create_global_plan([stock_load_plan(plan) for plan in global_plan])
        return [own_load_plan(plan) for plan in plans]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the wrapped planner's final load plan of this rank."""
        with stock_errors("finish_plan"):
            return own_load_plan(self.wrapped.finish_plan(stock_load_plan(central_plan)))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Pass a stored object to the wrapped planner, unless its pickle names a class that is not on the allow-list.

        The allow-list is that of `dcp_core`. With `trust_objects`, every object is passed.

        Raises:
            UnsafeCheckpointError: The pickle has other classes or functions, which the message names, or the bytes are
                not a `torch.save` archive.
        """
        if not self._trust_objects:
            value = _harmless(read_item.storage_index.fqn, value.getvalue())
        with stock_errors("load_bytes"):
            self.wrapped.load_bytes(stock_read_item(read_item), value)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Return the buffer of the wrapped planner for a stored object."""
        return self.wrapped.resolve_bytes(stock_read_item(read_item))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor of the wrapped planner that an item is read into."""
        return self.wrapped.resolve_tensor(stock_read_item(read_item))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Notify the wrapped planner that a tensor has been read."""
        self.wrapped.commit_tensor(stock_read_item(read_item), tensor)


class LoadPlannerForStock(Delegating[LoadPlanner], planner.LoadPlanner):
    """Load planner of `torch.distributed.checkpoint` that delegates to a planner of this project.

    Example:
        ```python
        import torch
        import torch.distributed.checkpoint as stock
        from dcp_bridge import LoadPlannerForStock
        from dcp_core import DefaultLoadPlanner, save

        save({"model": torch.ones(3)}, checkpoint_id="step-1")
        planner = LoadPlannerForStock(DefaultLoadPlanner(rename={"encoder": "model"}))
        stock.load({"encoder": torch.zeros(3)}, checkpoint_id="step-1", planner=planner)
        ```
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: metadata.Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set up the wrapped planner for a template and stock's metadata."""
        self.wrapped.set_up_planner(state_dict, None if metadata is None else as_metadata(metadata), is_coordinator)

    def create_local_plan(self) -> planner.LoadPlan:
        """Return the wrapped planner's local load plan, converted to a plan of stock."""
        return stock_load_plan(self.wrapped.create_local_plan())

    def create_global_plan(self, global_plan: list[planner.LoadPlan]) -> list[planner.LoadPlan]:
        """Pass the local plans of all ranks to the wrapped planner; return stock's plans, one per rank."""
        plans = self.wrapped.create_global_plan([own_load_plan(plan) for plan in global_plan])
        return [stock_load_plan(plan) for plan in plans]

    def finish_plan(self, central_plan: planner.LoadPlan) -> planner.LoadPlan:
        """Return the wrapped planner's final load plan of this rank, converted to a plan of stock."""
        return stock_load_plan(self.wrapped.finish_plan(own_load_plan(central_plan)))

    def load_bytes(self, read_item: planner.ReadItem, value: io.BytesIO) -> None:
        """Pass a stored object to the wrapped planner."""
        self.wrapped.load_bytes(own_read_item(read_item), value)

    def resolve_bytes(self, read_item: planner.ReadItem) -> io.BytesIO:
        """Return the buffer of the wrapped planner for a stored object."""
        return self.wrapped.resolve_bytes(own_read_item(read_item))

    def resolve_tensor(self, read_item: planner.ReadItem) -> torch.Tensor:
        """Return the tensor of the wrapped planner that an item is read into."""
        return self.wrapped.resolve_tensor(own_read_item(read_item))

    def commit_tensor(self, read_item: planner.ReadItem, tensor: torch.Tensor) -> None:
        """Notify the wrapped planner that a tensor has been read."""
        self.wrapped.commit_tensor(own_read_item(read_item), tensor)


def _harmless(key: str, data: bytes) -> io.BytesIO:
    """Re-pickle an object that our allow-list has loaded: stock may unpickle these bytes without restriction.

    The original bytes are not passed on, since another reader may interpret untrusted bytes differently.
    """
    remedy = (
        "use dcp_core.DefaultLoadPlanner, or, if you trust the checkpoint, trust_objects=True with from_stock(planner) "
        "or to_stock(reader)"
    )
    try:
        return io.BytesIO(dump_object(load_object(data, key=key), key=key))
    except CorruptCheckpointError as error:
        raise UnsafeCheckpointError(
            f"the object {key!r} is not in torch.save's form, so that nobody can tell what unpickling it would run; "
            f"{remedy}"
        ) from error
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(
            f"the object {key!r} names {', '.join(scan(data))}, which a planner of torch.distributed.checkpoint would "
            f"unpickle without restriction; {remedy}"
        ) from error
