"""Storage reader adapters: `StockReader` wraps stock's reader, `ReaderForStock` ours.

Source: torch 2.13 `torch.distributed.checkpoint.storage.StorageReader` (contract).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as stock_records
from torch.distributed.checkpoint import planner, storage

from dcp_bridge.calls import stock_errors
from dcp_bridge.load_planners import LoadPlannerForStock, StockLoadPlanner
from dcp_bridge.own_records import own_load_plan
from dcp_bridge.stock_records import stock_load_plan, stock_metadata
from dcp_bridge.wrapper import StorageWrapper
from dcp_core import CheckpointNotFoundError, LoadPlan, LoadPlanner, Metadata, StorageReader
from dcp_core.records.foreign_records import as_metadata
from dcp_core.records.metadata import note_checkpoint_id
from dcp_core.records.protocols import takes


class StockReader(StorageWrapper[storage.StorageReader], StorageReader):
    """Storage reader that delegates to a reader of stock.

    Stock's file reader unpickles `.metadata` without restriction and checks no CRC: the report lists all keys as
    unverified.
    """

    def __init__(self, wrapped: storage.StorageReader) -> None:
        super().__init__(wrapped)
        self._found: tuple[Metadata, stock_records.Metadata] | None = None
        self._rank_local = False
        self.unverified_keys: set[str] = set()
        """Keys that the last `read_data` read."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load."""
        self.wrapped.reset(checkpoint_id)
        self._found = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return its metadata; with the keyword `rank`, that rank's of a save without coordinator.

        Raises:
            CheckpointNotFoundError: The checkpoint does not exist.
        """
        del args
        rank = kwargs.get("rank")
        has_more = takes(self.wrapped.read_metadata, "kwargs")
        try:
            with stock_errors("read_metadata"):
                found = self.wrapped.read_metadata(**({"rank": rank} if has_more and rank is not None else {}))
        except FileNotFoundError as error:
            if rank is None and has_more:
                raise  # the loader retries with the rank
            raise CheckpointNotFoundError(
                f"{type(self.wrapped).__qualname__} finds no checkpoint at {self.checkpoint_id}: {error}"
            ) from error
        own = as_metadata(found)
        self._rank_local = rank is not None
        meta = note_checkpoint_id(own, self.checkpoint_id)
        if self._rank_local:
            meta.save_id = None  # ranks' save ids may differ
        self._found = own, found
        return own

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set up the wrapped reader."""
        del args
        own, found = self._found or (None, None)
        if found is None or own is not metadata:
            found = stock_metadata(metadata)
        set_up = self.wrapped.set_up_storage_reader
        known = {"rank": kwargs.get("rank", 0), "use_collectives": not self._rank_local}
        more = known if takes(set_up, "kwargs") else {}
        with stock_errors("set_up_storage_reader"):
            set_up(found, is_coordinator, **more)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return its local plan."""
        with stock_errors("prepare_local_plan"):
            return own_load_plan(self.wrapped.prepare_local_plan(stock_load_plan(plan)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return its global plans."""
        with stock_errors("prepare_global_plan"):
            prepared = self.wrapped.prepare_global_plan([stock_load_plan(plan) for plan in plans])
        return [own_load_plan(plan) for plan in prepared]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read a plan's items."""
        stock = LoadPlannerForStock(planner)
        self.unverified_keys = {item.storage_index.fqn for item in plan.items}
        with stock_errors("read_data"):
            return self.wrapped.read_data(stock_load_plan(plan), stock)


class ReaderForStock(StorageWrapper[StorageReader], storage.StorageReader):
    """Storage reader of stock that delegates to our reader, which checks CRCs."""

    def __init__(self, wrapped: StorageReader, *, trust_objects: bool = False) -> None:
        super().__init__(wrapped)
        self._trust_objects = trust_objects
        self._found: tuple[stock_records.Metadata, Metadata] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load."""
        self.wrapped.reset(checkpoint_id)
        self._found = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> stock_records.Metadata:
        """Return stock's form of the metadata. `rank` is ignored: rank-local indexes are merged."""
        own = self.wrapped.read_metadata(*args, **(kwargs if takes(self.wrapped.read_metadata, "kwargs") else {}))
        found = stock_metadata(own)
        self._found = found, own
        return found

    def set_up_storage_reader(
        self, metadata: stock_records.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Set up the wrapped reader."""
        found, own = self._found or (None, None)
        if own is None or found is not metadata:
            own = as_metadata(metadata)
        set_up = self.wrapped.set_up_storage_reader
        set_up(own, is_coordinator, *args, **(kwargs if takes(set_up, "kwargs") else {}))

    def prepare_local_plan(self, plan: planner.LoadPlan) -> planner.LoadPlan:
        """Return its local plan."""
        return stock_load_plan(self.wrapped.prepare_local_plan(own_load_plan(plan)))

    def prepare_global_plan(self, plans: list[planner.LoadPlan]) -> list[planner.LoadPlan]:
        """Return its global plans."""
        return [
            stock_load_plan(plan) for plan in self.wrapped.prepare_global_plan([own_load_plan(plan) for plan in plans])
        ]

    def read_data(self, plan: planner.LoadPlan, planner: planner.LoadPlanner) -> torch.futures.Future[None]:
        """Read and verify a plan's items."""
        own: LoadPlanner
        if isinstance(planner, LoadPlannerForStock):
            own = planner.wrapped
        else:
            own = StockLoadPlanner(planner, trust_objects=self._trust_objects)
        return self.wrapped.read_data(own_load_plan(plan), own)
