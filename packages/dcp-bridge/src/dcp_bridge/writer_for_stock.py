"""`WriterForStock`: adapter of our storage writer for stock's `save`.

Source: torch 2.13 `torch.distributed.checkpoint.storage.StorageWriter` (contract), `state_dict_saver` (order of calls).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as stock_records
from torch.distributed.checkpoint import planner, storage

from dcp_base.logs import library_logger
from dcp_bridge.own_records import own_result, own_save_plan
from dcp_bridge.save_planners import SavePlannerForStock, StockSavePlanner
from dcp_bridge.stock_records import stock_metadata, stock_result, stock_save_plan, stock_storage_meta
from dcp_bridge.wrapper import StorageWrapper
from dcp_core import DcpError, StorageWriter
from dcp_core.records.foreign_records import as_metadata
from dcp_core.records.protocols import takes

_log = library_logger(__name__)


class WriterForStock(StorageWrapper[StorageWriter], storage.StorageWriter):
    """Storage writer of stock that delegates to our writer.

    Checkpoints are durable, checksummed, and published atomically. Stock does not report other ranks' failures: the
    writer's next save or deletion removes that save's files, or a later save after this process ended.

    `save_id` is a new id, equal on all ranks, for a save with `use_collectives=False`, for which stock has none.
    """

    def __init__(self, wrapped: StorageWriter, *, save_id: str | None = None) -> None:
        super().__init__(wrapped)
        self._save_id = save_id
        self._is_coordinator = False
        self._running = False

    def __getstate__(self) -> dict[str, Any]:
        # A running save does not run in a copy.
        return {**vars(self), "_running": False}

    def __del__(self) -> None:
        if vars(self).get("_running"):
            self._clear_away()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save."""
        self._clear_away()
        self.wrapped.reset(checkpoint_id)

    def storage_meta(self) -> stock_records.StorageMeta | None:
        """Return its storage metadata or None."""
        return stock_storage_meta(self.wrapped.storage_meta())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set up the wrapped writer. Raises DcpError without collectives and `save_id`."""
        self._clear_away()
        self._is_coordinator = is_coordinator
        if not kwargs.get("use_collectives", True):
            if self._save_id is None:
                raise DcpError(
                    "a save with use_collectives=False needs an id that all ranks agree on, and stock agrees on none: "
                    "pass to_stock(writer, save_id=…), a new one for each save"
                )
            world_size = dist.get_world_size() if dist.is_initialized() else 1
            kwargs |= {"save_id": self._save_id, "world_size": world_size}
        set_up = self.wrapped.set_up_storage_writer
        self._running = True
        with self._part_of_save():
            set_up(is_coordinator, *args, **(kwargs if takes(set_up, "kwargs") else {}))

    def prepare_local_plan(self, plan: planner.SavePlan) -> planner.SavePlan:
        """Return its local plan."""
        with self._part_of_save():
            return stock_save_plan(self.wrapped.prepare_local_plan(own_save_plan(plan)))

    def prepare_global_plan(self, plans: list[planner.SavePlan]) -> list[planner.SavePlan]:
        """Return its global plans."""
        with self._part_of_save():
            prepared = self.wrapped.prepare_global_plan([own_save_plan(plan) for plan in plans])
            prepared = self.wrapped.placed_plans(prepared)
            return [stock_save_plan(plan) for plan in prepared]

    def write_data(
        self, plan: planner.SavePlan, planner: planner.SavePlanner
    ) -> torch.futures.Future[list[storage.WriteResult]]:
        """Write a plan's items, and return a completed future."""
        own = planner.wrapped if isinstance(planner, SavePlannerForStock) else StockSavePlanner(planner)
        with self._part_of_save():
            written = self.wrapped.write_data(own_save_plan(plan), own)
            written.wait()
            results = [stock_result(result) for result in written.value()]
        done: torch.futures.Future[list[storage.WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata: stock_records.Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Publish the checkpoint; copy metadata fields that the writer sets."""
        own = as_metadata(metadata)
        with self._part_of_save():
            self.wrapped.finish(own, [[own_result(result) for result in one] for one in results])
        self._running = False
        found = stock_metadata(own)
        metadata.storage_data, metadata.storage_meta = found.storage_data, found.storage_meta
        metadata.version = own.version

    @contextlib.contextmanager
    def _part_of_save(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._running = False
            self._abort(error)
            raise

    def _clear_away(self) -> None:
        """On the coordinator, remove an unfinished earlier save; stock does not report its end to other ranks."""
        running, self._running = self._running, False
        if running and self._is_coordinator:
            self._abort(DcpError("the save failed on another rank"))

    def _abort(self, error: BaseException) -> None:
        abort = getattr(self.wrapped, "abort", None)
        if abort is None:
            return
        try:
            abort(error)
        except Exception:  # noqa: BLE001 - the save's own error is raised
            _log.exception("clearing up a failed save failed too")
