"""`StockWriter`: adapter of stock's storage writer for our `save`.

Source: torch 2.13 `torch.distributed.checkpoint.storage.StorageWriter` (contract).
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import staging, storage

from dcp_bridge.calls import stock_errors
from dcp_bridge.own_records import own_result, own_save_plan, own_storage_meta
from dcp_bridge.save_planners import SavePlannerForStock, StockSavePlanner
from dcp_bridge.stock_records import stock_metadata, stock_result, stock_save_plan
from dcp_bridge.wrapper import StorageWrapper
from dcp_core import DcpError, Metadata, SavePlan, SavePlanner, StorageMeta, StorageWriter, WriteResult
from dcp_core.records.foreign_records import as_metadata
from dcp_core.records.protocols import takes

_SHOWN_ITEMS = 5


class StockWriter(StorageWrapper[storage.StorageWriter], StorageWriter):
    """Storage writer that delegates to a writer of stock.

    Errors are raised on all ranks, and no rank hangs. Durability and atomicity depend on the wrapped writer.
    `check_results`: raise if the writer does not report every item as written. Stock's multithreaded file writer
    reports no error of a thread.
    """

    def __init__(self, wrapped: storage.StorageWriter, *, check_results: bool = True) -> None:
        super().__init__(wrapped)
        self._check_results = check_results

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save."""
        self.wrapped.reset(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Return its storage metadata or None."""
        return own_storage_meta(self.wrapped.storage_meta())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set up the wrapped writer with stock's keyword arguments."""
        del args
        set_up = self.wrapped.set_up_storage_writer
        known = {name: value for name, value in kwargs.items() if name in ("rank", "use_collectives")}
        with stock_errors("set_up_storage_writer"):
            set_up(is_coordinator, **(known if takes(set_up, "kwargs") else {}))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return its local plan, in which tied tensors are written under each name."""
        with stock_errors("prepare_local_plan"):
            return own_save_plan(self.wrapped.prepare_local_plan(stock_save_plan(replace(plan, aliases=None))))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return its global plans."""
        with stock_errors("prepare_global_plan"):
            prepared = self.wrapped.prepare_global_plan([stock_save_plan(plan) for plan in plans])
        return [own_save_plan(plan) for plan in prepared]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write a plan's items, and return a completed future; see `check_results`."""
        stock = planner.wrapped if isinstance(planner, StockSavePlanner) else SavePlannerForStock(planner)
        with stock_errors("write_data"):
            future = self.wrapped.write_data(stock_save_plan(plan), stock)
            future.wait()
            results = [own_result(result) for result in future.value()]
        if self._check_results:
            self._check(plan, results)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def _check(self, plan: SavePlan, results: list[WriteResult]) -> None:
        written = {result.index for result in results}
        lost = [item.index.fqn for item in plan.items if item.index not in written]
        if lost:
            shown = ", ".join(map(repr, lost[:_SHOWN_ITEMS])) + (", …" if len(lost) > _SHOWN_ITEMS else "")
            raise DcpError(
                f"{type(self.wrapped).__qualname__} did not report {len(lost)} of {len(plan.items)} items as written: "
                f"{shown}. Look for an error in its threads above; if the writer reports nothing by design, pass "
                "from_stock(writer, check_results=False)"
            )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Finish the save; copy metadata fields that the writer sets."""
        stock = stock_metadata(metadata)
        with stock_errors("finish"):
            self.wrapped.finish(stock, [[stock_result(result) for result in one] for one in results])
        found = as_metadata(stock)
        metadata.storage_data, metadata.storage_meta = found.storage_data, found.storage_meta
        metadata.version, metadata.planner_data = found.version, found.planner_data

    def abort(self, error: BaseException) -> None:
        """Call the wrapped writer's `abort`, if any."""
        abort = getattr(self.wrapped, "abort", None)
        if abort is not None:
            abort(error)


class StockStagingWriter(StockWriter):
    """A `StockWriter` for a writer that is also a stager of asynchronous saves."""

    @property
    def _stager(self) -> Any:
        return self.wrapped

    @property
    def _synchronize_after_execute(self) -> bool:
        return bool(self._stager.should_synchronize_after_execute)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """The wrapped stager's property."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]] | dict[str, Any]:
        """Return its copy."""
        staged: Future[dict[str, Any]] | dict[str, Any] = self._stager.stage(state_dict)
        return staged

    def synchronize_staging(self) -> None:
        """Wait for its copy."""
        self._stager.synchronize_staging()

    def close(self) -> None:
        """Close the stager, if possible."""
        getattr(self._stager, "close", lambda: None)()


def is_stager(writer: object) -> bool:
    """Return whether a writer has its own staging; False for stock's default file writers."""
    if not isinstance(writer, staging.AsyncStager):
        return False
    plain = {storage.StorageWriter, staging.BlockingAsyncStager}
    maker = next((base for base in type(writer).__mro__ if "stage" in vars(base)), type(writer))
    of_stock = maker in plain or maker.__module__ == "torch.distributed.checkpoint.filesystem"
    return not of_stock or bool(
        getattr(writer, "cache_staged_state_dict", False) or getattr(writer, "type_check", False)
    )
