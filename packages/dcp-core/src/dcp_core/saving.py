"""`save`: the sequence of calls to planner, storage writer and coordinator that saves a checkpoint.

Source: torch 2.13 `torch.distributed.checkpoint.state_dict_saver` (signatures, order of calls).
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from dcp_core.adopt_foreign import adopt_save_planner, adopt_writer
from dcp_core.calls.outside_compile import outside_compile
from dcp_core.calls.positional import with_positional_storage
from dcp_core.errors import RANK_ERRORS, UnsupportedValueError
from dcp_core.events import Operation
from dcp_core.planning.plan_exchange import PlanExchange
from dcp_core.planning.save_planner import DefaultSavePlanner
from dcp_core.records.abilities import SavePlannerAbilities, WriterAbilities, abilities, set_up_save_planner, takes
from dcp_core.records.metadata import DeferredMetadata, Metadata
from dcp_core.records.plan import SavePlan
from dcp_core.records.protocols import (
    CheckpointId,
    SavePlanner,
    StorageWriter,
    WriteResult,
    check_state_dict,
    placed_plans,
    with_states,
)
from dcp_core.shards.fed_tensors import TensorFeed
from dcp_core.state_dict.per_rank import with_rank_values
from dcp_core.storage.checkpoint_ids import absolute_id_for
from dcp_core.storage_choice import resolve_writer
from dcp_core.tables.plan_columns import written_of
from dcp_manifest.logs import library_logger
from dcp_ranks import DEFAULT_TIMEOUT_SECONDS, Coordinator, PeerOptions, make_coordinator

__all__ = ["measure_with", "save", "save_state_dict", "save_with"]

_log = library_logger(__name__)


@with_positional_storage("storage_writer")
@outside_compile
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
    """Save a state dict as a checkpoint, which exists and is durable when `save` returns.

    If `save` raises, the previous checkpoint is unchanged, or the new one is complete if the failure came after
    publishing; never a mixture of both.

    Args:
        state_dict: State dict with tensors of any kind, nested containers and objects. For a `Stateful`, the result of
            its `state_dict()` is saved; for a `PerRank`, each rank's own object. Not changed.
        checkpoint_id: Id of the checkpoint to write: a folder, or a URI that an installed storage handles.
        storage_writer: Writer to use instead of the one that `checkpoint_id` selects. If dcp-bridge is installed,
            writers and planners of `torch.distributed.checkpoint` are accepted as well.
        planner: Save planner that decides which rank writes which item; None for a `DefaultSavePlanner`. A planner can
            be used in one save at a time.
        process_group: Process group of the ranks that save together; None for all ranks.
        no_dist: Whether this process saves alone, even if process groups exist.
        use_collectives: Whether the ranks plan together. If False, every rank plans alone: replicated tensors are
            written by every rank, and each rank writes a rank-local index.
        timeout_seconds: Time in seconds that a rank waits for the other ranks in one phase, counted from its own
            arrival.
        peers: Options for how ranks detect the death of other ranks before the timeout; None for the defaults.

    Returns:
        The checkpoint's metadata.

    Raises:
        CheckpointException: The save failed on at least one of several ranks; raised on every rank, with rank, phase
            and traceback.
        Exception: The save failed in a job of one process; the error is raised unchanged.

    Ranks: every rank of the group; collective.
    Source: torch 2.13 `state_dict_saver.save`.

    Example:
        ```python
        import torch
        from dcp_core import save

        model = torch.nn.Linear(4, 2)
        save({"model": model.state_dict(), "step": 100}, checkpoint_id="run/step-100")
        ```
    """
    return save_with(
        make_coordinator(
            process_group, no_dist=no_dist, timeout_seconds=timeout_seconds, peers=peers, errors=RANK_ERRORS
        ),
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
    """Save a state dict as a checkpoint: deprecated form of `save`, with `coordinator_rank` as an argument.

    Args:
        state_dict: State dict to save.
        storage_writer: Writer of the checkpoint.
        process_group: Process group of the ranks that save together; None for all ranks.
        coordinator_rank: Rank within the group that is the coordinator.
        no_dist: Whether this process saves alone, even if process groups exist.
        planner: Save planner; None for a `DefaultSavePlanner`.
    """
    warnings.warn("save_state_dict is deprecated; use save", FutureWarning, stacklevel=2)
    storage_writer.reset()
    coordinator = make_coordinator(
        process_group, no_dist=no_dist, coordinator_rank=coordinator_rank, errors=RANK_ERRORS
    )
    group = getattr(process_group, "group_name", None)
    return save_with(coordinator, state_dict, storage_writer=storage_writer, planner=planner, group=group)


@dataclass(slots=True)
class _Save:
    """The state of one save on one rank."""

    state_dict: dict[str, Any]
    checkpoint_id: CheckpointId | None
    writer: StorageWriter | None
    planner: SavePlanner
    coordinator: Coordinator
    use_collectives: bool
    metadata: Metadata | None = field(default=None)
    bytes_written: int = 0
    compression_choice: str | None = None

    def place(self) -> CheckpointId | None:
        """Return the checkpoint id, as far as it is known without the other ranks."""
        return self.checkpoint_id if self.checkpoint_id is not None else self.can().checkpoint_id

    def can(self) -> WriterAbilities:
        """Return the writer's optional abilities, beyond the methods of `StorageWriter`."""
        return abilities(self.writer, WriterAbilities)

    def plan_locally(self) -> SavePlan:
        check_state_dict(self.state_dict)  # a model in its place matters more than a missing checkpoint id
        self.writer = resolve_writer(self.writer, self.checkpoint_id)
        state_dict = with_rank_values(with_states(self.state_dict), self.coordinator.rank)
        can = self.can()
        if can.renew_save_id is not None:  # it may have saved before
            can.renew_save_id()
        meta = self.writer.storage_meta()
        set_up_save_planner(self.planner, state_dict, meta, is_coordinator=self.coordinator.is_coordinator)
        self._set_up_writer()
        plan = self.writer.prepare_local_plan(self.planner.create_local_plan())
        if plan.aliases and not can.stores_aliases:
            # It would publish names that have no stored data: instead each gets its own data, as in stock.
            plan = replace(plan, aliases=None)
        return plan

    def _set_up_writer(self) -> None:
        set_up = self.chosen_writer().set_up_storage_writer
        if not takes(set_up, "kwargs"):
            set_up(self.coordinator.is_coordinator)
            return
        extra: dict[str, Any] = {"rank": self.coordinator.rank, "use_collectives": self.use_collectives}
        if not self.use_collectives:
            extra |= {"save_id": self.coordinator.save_nonce(), "world_size": self.coordinator.world_size}
        set_up(self.coordinator.is_coordinator, **extra)

    def write(self, central_plan: SavePlan) -> list[WriteResult]:
        written = self.chosen_writer().write_data(self.planner.finish_plan(central_plan), self.planner)
        written.wait()
        results = written.value()
        self.compression_choice = getattr(self.writer, "compression_choice", None)
        columns = written_of(results)
        if columns is None:
            self.bytes_written = sum(result.size_in_bytes for result in results)
        else:
            self.bytes_written = int(columns.stored.columns.length.sum())
        return results

    def publish(self, metadata: Metadata | None, results: list[list[WriteResult]]) -> dict[str, Any] | None:
        """Publish the checkpoint. Returns the fields of the metadata that other ranks need, if they cannot read it."""
        if metadata is None:
            raise RuntimeError("the save was not planned")
        self.metadata = metadata
        writer = self.chosen_writer()
        writer.finish(metadata=metadata, results=results)
        # As fields, not as a Metadata: that one pickles as stock's class, which is not what other ranks should get.
        return dict(vars(metadata)) if self.can().published_metadata is None else None

    def save_alone(self) -> None:
        """Save this rank's own items, without any other rank."""
        plans, metadata = self.planner.create_global_plan([self.plan_locally()])
        (plan,) = placed_plans(self.chosen_writer(), plans)
        self.publish(metadata, [self.write(plan)])

    def result(self, fields: dict[str, Any] | None) -> Metadata:
        """Return the checkpoint's metadata; `fields` are those that `publish` returned, perhaps on another rank."""
        if self.metadata is not None:
            return self.metadata
        if fields is not None:
            return Metadata(**fields)
        writer = self.chosen_writer()
        meta = writer.storage_meta()
        twin: Any = _twin(writer)
        return DeferredMetadata(lambda: twin.published_metadata(None if meta is None else meta.save_id))

    def abort(self, error: BaseException) -> None:
        abort = self.can().abort
        if abort is None:
            return
        try:
            abort(error)
        except Exception:  # noqa: BLE001 - the error of the save itself matters more
            _log.exception("rank %d: clearing up a failed save failed too", self.coordinator.rank)

    def chosen_writer(self) -> StorageWriter:
        """Return the writer, after the local plan is made."""
        if self.writer is None:
            raise RuntimeError("the save was not planned")
        return self.writer


def _twin(writer: StorageWriter) -> StorageWriter:
    """Copy a writer, to read the metadata back even after the writer's next save to another id."""
    try:
        return copy.copy(writer)
    except Exception:  # noqa: BLE001 - a subclass may hold what cannot be copied; the checkpoint exists all the same
        return writer


def save_with(
    coordinator: Coordinator,
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    use_collectives: bool = True,
    group: Hashable = None,
    feed: TensorFeed | None = None,
) -> Metadata:
    """Save a state dict as `save` does, through an existing coordinator, in any thread or process.

    Args:
        coordinator: Coordinator of this save, which this function closes.
        state_dict: State dict to save.
        checkpoint_id: Id of the checkpoint to write.
        storage_writer: Writer to use instead of the one that `checkpoint_id` selects.
        planner: Save planner that decides which rank writes which item; None for a `DefaultSavePlanner`.
        use_collectives: Whether the ranks plan together; if False, every rank plans alone.
        group: Key of this group of ranks in the cache of plans.
        feed: Source of those tensors of this rank whose memory must not be read; `planner` is then a
            `DefaultSavePlanner`.

    Returns:
        The checkpoint's metadata.

    Raises:
        CheckpointException: The save failed on at least one of several ranks; raised on every rank.

    Ranks: every rank of the coordinator's group; collective.
    """
    with coordinator:  # an error in here reaches the other ranks
        writer = adopt_writer(storage_writer)
        planner = adopt_save_planner(planner) or DefaultSavePlanner()
        run = _Save(state_dict, checkpoint_id, writer, planner, coordinator, use_collectives)
        if feed is None:
            return _carry_out(run, PlanExchange(coordinator, planner, group))
        if not isinstance(planner, DefaultSavePlanner):
            raise UnsupportedValueError(f"a {type(planner).__qualname__} cannot plan tensors that come from a feed")
        planner.feed = feed
        try:
            return _carry_out(run, PlanExchange(coordinator, planner, group))
        finally:
            planner.feed = planner.fed_tensors = None


def measure_with(
    coordinator: Coordinator, state_dict: dict[str, Any], writer: StorageWriter, planner: SavePlanner | None
) -> None:
    """Run all steps of a save with a writer that only measures, and report the operation `estimate` to observers.

    The plan cache of real saves is not used or changed.

    Args:
        coordinator: Coordinator of this operation, which the caller closes.
        state_dict: State dict as for `save`.
        writer: Writer that stores nothing, from `ByteStorageWriter.measuring`.
        planner: Save planner; None for a `DefaultSavePlanner`.

    Ranks: every rank of the coordinator's group; collective.
    """
    planner = adopt_save_planner(planner) or DefaultSavePlanner()
    run = _Save(state_dict, None, writer, planner, coordinator, use_collectives=True)
    _carry_out(run, PlanExchange(coordinator, planner, "estimate"), name="estimate")


def _carry_out(run: _Save, plans: PlanExchange, *, name: str = "save") -> Metadata:
    coordinator, use_collectives = run.coordinator, run.use_collectives
    events = Operation(name, coordinator, run.place())
    with events.phase("total") as total:
        try:
            coordinator.agree("save", _intent(run), describe="checkpoint ids and planners")
            if not use_collectives:
                coordinator.all_gather("save", total.timed(run.save_alone))
                return run.result(None)
            with events.phase("plan") as planning:
                central_plan = plans.run(planning.timed(run.plan_locally), run.chosen_writer)
            with events.phase("write") as writing:
                connect_ranks = run.can().connect_ranks
                if connect_ranks is not None:
                    connect_ranks(coordinator, central_plan)
                fields = coordinator.all_reduce(
                    "write",
                    writing.timed(lambda: plans.pack_results(run.write(central_plan))),
                    lambda packed: run.publish(plans.metadata, plans.unpack_results(packed)),
                )
                writing.bytes = total.bytes = run.bytes_written
                writing.compression = run.compression_choice
                follow_commit = run.can().follow_commit
                if follow_commit is not None:
                    follow_commit(coordinator)
        except BaseException as error:
            plans.forget()
            run.abort(error)
            raise
    plans.succeeded()
    return run.result(fields)


def _intent(run: _Save) -> tuple[str, str, bool]:
    """Return the settings of a save that must be equal on all ranks."""
    # Subclasses of one planner may be mixed: their plans are of one kind.
    planner = abilities(run.planner, SavePlannerAbilities).stands_for or run.planner
    kinds = [cls for cls in type(planner).__mro__ if issubclass(cls, SavePlanner) and cls is not SavePlanner]
    # Relative paths are compared as absolute ones: ranks may have different working folders.
    place = absolute_id_for(run.writer, run.checkpoint_id)
    return os.fspath(place or ""), (kinds or [type(planner)])[-1].__qualname__, run.use_collectives
