"""`save`: local plan, exchange of plans, global plan, placement, write, publish.

`_Save.save_together` is this sequence; the methods above it are its steps, in order.

Source: torch 2.13 `torch.distributed.checkpoint.state_dict_saver`.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dcp_base.logs import library_logger
from dcp_core.arguments import absolute_id_for, adopted, resolve_storage
from dcp_core.calls import with_positional_storage
from dcp_core.events import Operation, Phase
from dcp_core.planning.plan_exchange import PackedResults, PlanExchange
from dcp_core.planning.save_planner import DefaultSavePlanner
from dcp_core.records.metadata import DeferredMetadata, Metadata
from dcp_core.records.protocols import (
    CheckpointId,
    SavePlan,
    SavePlanner,
    StorageWriter,
    WriteResult,
    check_state_dict,
    set_up_save_planner,
    takes,
    with_states,
)
from dcp_core.state_dict.per_rank import with_rank_values
from dcp_core.storage.byte_storage import collector_paused
from dcp_core.tables.plan_columns import written_of
from dcp_core.tensors.devices import finish_computing
from dcp_ranks import Coordinator, PeerOptions, make_coordinator
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS

_log = library_logger(__name__)


@with_positional_storage("storage_writer")
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    peers: PeerOptions | None = None,
) -> Metadata:
    """Save a state dict as a checkpoint that is complete and durable when `save` returns.

    ```python
    import torch
    from dcp_core import save

    model = torch.nn.Linear(4, 2)
    save({"model": model.state_dict(), "step": 100}, checkpoint_id="run/step-100")
    ```

    If `save` raises, the previous checkpoint is unchanged, or the new one is complete.

    Args:
        state_dict: Tensors of any kind, nested containers and objects; not changed. A `Stateful`'s `state_dict()` is
            saved, and each rank's own value of a `PerRank`.
        checkpoint_id: Directory, or URI that an installed storage handles.
        storage_writer: Writer; None to choose one by `checkpoint_id`. Dcp-bridge adapts stock's writers and planners.
        planner: Used by one save at a time; None for a `DefaultSavePlanner`.
        process_group: Ranks that save together; None for all.
        no_dist: Whether this process saves alone, even if process groups exist.
        use_collectives: Whether the ranks plan together. If not, each writes its replicas and a rank-local index.
        timeout_seconds: Wait for other ranks in one phase, from this rank's arrival.
        peers: How ranks detect others' death before the timeout.

    Raises:
        CheckpointException: A rank failed; raised on every rank, with rank, phase and traceback.
        Exception: With one process: the error itself.

    Ranks: every rank; collective.
    """
    return save_with(
        make_coordinator(process_group, no_dist=no_dist, timeout_seconds=timeout_seconds, peers=peers),
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        use_collectives=use_collectives,
        group=getattr(process_group, "group_name", None),
    )


def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Deprecated form of `save`; `coordinator_rank` counts within the group."""
    warnings.warn("save_state_dict is deprecated; use save", FutureWarning, stacklevel=2)
    storage_writer.reset()
    coordinator = make_coordinator(process_group, no_dist=no_dist, coordinator_rank=coordinator_rank)
    group = getattr(process_group, "group_name", None)
    return save_with(coordinator, state_dict, storage_writer=storage_writer, planner=planner, group=group)


@dataclass(slots=True)
class _Save:
    state_dict: dict[str, Any]
    checkpoint_id: CheckpointId | None
    storage_writer: StorageWriter | None
    planner: SavePlanner
    coordinator: Coordinator
    use_collectives: bool
    writer: StorageWriter = field(init=False)
    exchange: PlanExchange | None = None
    metadata: Metadata = field(init=False)
    bytes_written: int = 0

    def open_writer(self) -> tuple[str, str, bool]:
        """Open the writer; return what must be equal on all ranks."""
        check_state_dict(self.state_dict)  # report a wrong state dict before a missing checkpoint id
        # Compare absolute paths: ranks may have different working directories.
        folder = os.fspath(absolute_id_for(self.storage_writer, self.checkpoint_id) or "")
        self.writer = resolve_storage(self.storage_writer, self.checkpoint_id, "writer")
        return folder, self.planner.plan_family(), self.use_collectives

    def plan_locally(self) -> SavePlan:
        """Return all items that this rank could write."""
        writer, is_coordinator = self.writer, self.coordinator.is_coordinator
        state_dict = with_rank_values(with_states(self.state_dict), self.coordinator.rank)
        writer.renew_save_id()  # the writer may have saved before
        with collector_paused():
            set_up_save_planner(self.planner, state_dict, writer.storage_meta(), is_coordinator=is_coordinator)
            # A writer for stock takes no keyword arguments.
            settings: dict[str, Any] = {}
            if takes(writer.set_up_storage_writer, "kwargs"):
                settings = {"rank": self.coordinator.rank, "use_collectives": self.use_collectives}
                if not self.use_collectives:
                    settings |= {"save_id": self.coordinator.save_nonce(), "world_size": self.coordinator.world_size}
            writer.set_up_storage_writer(is_coordinator, **settings)
            plan = writer.prepare_local_plan(self.planner.create_local_plan())
        # A writer without aliases would publish names without data: each name gets its own data, as in stock.
        return plan if writer.stores_aliases or not plan.aliases else replace(plan, aliases=None)

    def plan_globally(self, plans: list[SavePlan], known: Metadata | None = None) -> tuple[list[SavePlan], Metadata]:
        """Return each rank's items with their place in storage, and the metadata.

        `plans` are the ranks' local plans, or the final ones of an earlier save, whose metadata is `known`.

        Ranks: the coordinator, or every rank without one.
        """
        if known is None:
            plans, self.metadata = self.planner.create_global_plan(plans)
        else:
            self.planner.adopt_global_plan(plans, known)
            self.metadata = known
        return self.writer.placed_plans(self.writer.prepare_global_plan(plans)), self.metadata

    def write(self, plan: SavePlan) -> list[WriteResult] | PackedResults:
        """Write this rank's items."""
        plan = self.planner.finish_plan(plan)
        if torch.accelerator.is_available():
            held = self.planner.plain_values()
            finish_computing(None if held is None else held.values())
        written = self.writer.write_data(plan, self.planner)
        written.wait()
        results = written.value()
        columns = written_of(results)
        if columns is None:
            self.bytes_written = sum(result.size_in_bytes for result in results)
        else:
            self.bytes_written = int(columns.stored.columns.length.sum())
        return self.exchange.pack_results(results) if self.exchange and self.exchange.packs else results

    def publish(self, results: list[Any]) -> dict[str, Any] | None:
        """Publish the index of what the ranks wrote; return the metadata for ranks that cannot read it back.

        Ranks: the coordinator, or every rank without one.
        """
        for rank in range(len(results)):
            if self.exchange and isinstance(results[rank], PackedResults):
                results[rank] = self.exchange.unpack_results(results[rank], rank)  # frees what ranks of one form share
        # The list is the writer's own, which needs its memory for the index. A writer that wraps another one keeps it.
        results.reverse()
        self.writer.finish(metadata=self.metadata, results=[results.pop() for _ in range(len(results))])
        # A Metadata would unpickle as stock's class on the other ranks; send its fields.
        return None if self.writer.reads_back else dict(vars(self.metadata))

    def save_together(self, events: Operation, total: Phase, group: Hashable) -> None:
        """Save with a plan of all ranks.

        Ranks: every rank; collective.
        """
        coordinator, writer = self.coordinator, self.writer
        exchange = self.exchange = PlanExchange(coordinator, self.planner, group)
        try:
            with events.phase("plan") as planning:
                plan = exchange.run(planning.timed(self.plan_locally), self.plan_globally)
            with events.phase("write") as writing:
                writer.connect_ranks(coordinator, plan)
                write = writing.timed(partial(self.write, plan))
                fields = coordinator.all_reduce("write", write, reduce_fn=self.publish)
                writing.bytes = total.bytes = self.bytes_written
                writer.follow_commit(coordinator)
        except BaseException:
            exchange.forget()
            raise
        if exchange.packs:
            exchange.succeeded()
        if not coordinator.is_coordinator:
            self.metadata = _read_later(writer) if fields is None else Metadata(**fields)

    def save_rank_local(self) -> None:
        """Save this rank's values with an index of their own."""
        (plan,), _ = self.plan_globally([self.plan_locally()])
        self.publish([self.write(plan)])

    def abort(self, error: BaseException) -> None:
        """Remove what this rank wrote."""
        try:
            self.writer.abort(error)
        except Exception:  # noqa: BLE001 - the save's own error is raised
            _log.exception("rank %d: clearing up a failed save failed too", self.coordinator.rank)


def _read_later(writer: StorageWriter) -> Metadata:
    meta = writer.storage_meta()
    with suppress(Exception):  # a subclass may not support copying; the checkpoint exists anyway
        writer = copy.copy(writer)
    return DeferredMetadata(lambda: writer.published_metadata(None if meta is None else meta.save_id))


def save_with(
    coordinator: Coordinator,
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    use_collectives: bool = True,
    group: Hashable = None,
) -> Metadata:
    """Save through a coordinator, which is closed; `group` is the key of the plan cache.

    Ranks: every rank; collective.
    """
    with coordinator:  # sends errors to the other ranks
        writer = adopted(storage_writer, StorageWriter)
        planner = adopted(planner, SavePlanner) or DefaultSavePlanner()
        place = checkpoint_id if checkpoint_id is not None or writer is None else writer.checkpoint_id
        run = _Save(state_dict, checkpoint_id, writer, planner, coordinator, use_collectives)
        events = Operation("save", coordinator, place)
        with events.phase("total") as total:
            coordinator.agree("save", run.open_writer, describe="checkpoint ids and planners")
            try:
                if use_collectives:
                    run.save_together(events, total, group)
                else:
                    coordinator.all_gather("save", total.timed(run.save_rank_local))
            except BaseException as error:
                run.abort(error)
                raise
    return run.metadata
