"""`load` and `load_keys`: the sequence of calls to planner, storage reader and coordinator that loads a checkpoint.

Source: torch 2.13 `torch.distributed.checkpoint.state_dict_loader` (signatures, order of calls).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from dcp_core.adopt_foreign import adopt_load_planner, adopt_reader, read_metadata
from dcp_core.calls.outside_compile import outside_compile
from dcp_core.calls.positional import with_positional_storage
from dcp_core.errors import RANK_ERRORS, CheckpointNotFoundError, DcpError
from dcp_core.events import Operation
from dcp_core.planning.load_planner import DefaultLoadPlanner, EmptyStateDictLoadPlanner
from dcp_core.planning.load_report import LoadMismatchError, LoadProblem, LoadReport
from dcp_core.planning.read_items import LocalLoadPlan
from dcp_core.records.abilities import LoadPlannerAbilities, ReaderAbilities, abilities, takes
from dcp_core.records.metadata import Metadata
from dcp_core.records.plan import LoadPlan
from dcp_core.records.protocols import (
    CheckpointId,
    LoadPlanner,
    Stateful,
    StorageReader,
    check_state_dict,
    in_shared_order,
    is_stateful,
    with_states,
)
from dcp_core.state_dict.per_rank import RankValues
from dcp_core.storage.checkpoint_ids import absolute_id_for
from dcp_core.storage.cooperation import Cooperation, Offer
from dcp_core.storage.storage_reader import ByteStorageReader
from dcp_core.storage_choice import resolve_reader
from dcp_io import CheckpointReplacedError
from dcp_ranks import DEFAULT_TIMEOUT_SECONDS, Coordinator, PeerOptions, make_coordinator

__all__ = ["load", "load_by_reader", "load_keys", "load_state_dict"]

_MAX_ATTEMPTS = 3
# Global planning steps that return the plans unchanged.
_IDENTITIES = (DefaultLoadPlanner.create_global_plan, ByteStorageReader.prepare_global_plan)


@with_positional_storage("storage_reader")
@outside_compile
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    peers: PeerOptions | None = None,
    cooperative: bool | None = None,
) -> LoadReport:
    """Load a checkpoint into a state dict, in place, and reshard its tensors if they were saved with other sharding.

    Args:
        state_dict: State dict to load into, called the template: each rank's tensors and shards are filled in their own
            memory; objects are replaced. For a `Stateful`, the result of its `state_dict()` is the template, and the
            loaded state is passed to its `load_state_dict`.
        checkpoint_id: Id of the checkpoint to load: a folder, or a URI that an installed storage handles.
        storage_reader: Reader to use instead of the one that `checkpoint_id` selects.
        planner: Load planner that decides which stored data is read into which tensors; None for a
            `DefaultLoadPlanner`.
        process_group: Process group of the ranks that load together; None for all ranks.
        no_dist: Whether this process loads alone, even if process groups exist.
        timeout_seconds: Time in seconds that a rank waits for the other ranks in one phase, counted from its own
            arrival.
        peers: Options for how ranks detect the death of other ranks before the timeout; None for the defaults.
        cooperative: Whether the ranks read together: each stored byte is read by one rank, and passed on to the other
            ranks that want it. This needs the package dcp-exchange. None decides by the storage: together from object
            stores and network file systems, each rank for itself from a local disk, or without dcp-exchange. The report
            says which way was taken, and why.

    Returns:
        Report of this rank's load: missing, unexpected, converted and resized tensors, and other findings.

    Raises:
        CheckpointException: The load failed on at least one of several ranks; raised on every rank, with rank, phase
            and traceback. Tensors that were read before the failure have changed; the message names them.
        LoadMismatchError: In a job of one process, the template does not match the checkpoint.
        CorruptCheckpointError: In a job of one process, the checkpoint is damaged.
        CheckpointNotFoundError: In a job of one process, there is no checkpoint at the checkpoint id.

    Ranks: every rank of the group; collective.
    Source: torch 2.13 `state_dict_loader.load` (returns None there).

    Example:
        ```python
        import torch
        from dcp_core import load, save

        save({"weight": torch.ones(3), "step": 100}, checkpoint_id="step-100")
        state = {"weight": torch.zeros(3), "step": 0}
        report = load(state, checkpoint_id="step-100")
        assert state["step"] == 100 and state["weight"].sum() == 3
        ```
    """
    coordinator = make_coordinator(
        process_group, no_dist=no_dist, timeout_seconds=timeout_seconds, peers=peers, errors=RANK_ERRORS
    )
    cooperation = Cooperation(cooperative, timeout_seconds=timeout_seconds, peers=peers)
    return _load(state_dict, checkpoint_id, storage_reader, planner, coordinator, cooperation)


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> LoadReport:
    """Load a checkpoint into a state dict: deprecated form of `load`, with `coordinator_rank` as an argument.

    Args:
        state_dict: State dict to load into.
        storage_reader: Reader of the checkpoint.
        process_group: Process group of the ranks that load together; None for all ranks.
        coordinator_rank: Rank within the group that is the coordinator.
        no_dist: Whether this process loads alone, even if process groups exist.
        planner: Load planner; None for a `DefaultLoadPlanner`.
    """
    warnings.warn("load_state_dict is deprecated; use load", FutureWarning, stacklevel=2)
    storage_reader.reset()
    return load_by_reader(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)


def load_by_reader(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> LoadReport:
    """Load a checkpoint without calling `storage_reader.reset`, as stock's private `_load_state_dict` does.

    The arguments are those of `load_state_dict`.

    Source: torch 2.13 `state_dict_loader._load_state_dict` (signature).
    """
    coordinator = make_coordinator(
        process_group, no_dist=no_dist, coordinator_rank=coordinator_rank, errors=RANK_ERRORS
    )
    return _load(state_dict, None, storage_reader, planner, coordinator, Cooperation(None))


@outside_compile
def load_keys(
    keys: Iterable[str] | str | None = None,
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    allow_globals: Iterable[Any] = (),
    trust_objects: bool = False,
    cooperative: bool | None = None,
) -> dict[str, Any]:
    """Load all or some keys of a checkpoint without a template, as whole CPU tensors in the nesting that was saved.

    Args:
        keys: Keys to load: exact FQNs, or prefixes of FQNs (`"model"` loads everything under `model.`). None loads the
            whole checkpoint.
        checkpoint_id: Id of the checkpoint to load: a folder, or a URI that an installed storage handles.
        storage_reader: Reader to use instead of the one that `checkpoint_id` selects.
        process_group: Process group of the ranks that load together; None for all ranks. Every rank gets whole tensors.
        no_dist: Whether this process loads alone, even if process groups exist.
        allow_globals: Classes and functions that stored objects may use in addition to the default allow-list.
        trust_objects: Whether to unpickle stored objects without restriction, which lets a checkpoint run any code.
        cooperative: Whether the ranks read together; see `load`.

    Returns:
        Nested state dict of the loaded tensors and objects.

    Raises:
        KeyError: One of `keys` matches nothing in the checkpoint.

    Ranks: every rank of the group; collective.
    Source: torch 2.13 `state_dict_loader._load_state_dict_from_keys`.

    Example:
        ```python
        import torch
        from dcp_core import load_keys, save

        save({"model": {"weight": torch.ones(3)}, "step": 100}, checkpoint_id="step-100")
        state = load_keys("model", checkpoint_id="step-100")
        assert state["model"]["weight"].tolist() == [1, 1, 1]
        ```
    """
    planner = EmptyStateDictLoadPlanner(keys, allow_globals=tuple(allow_globals), trust_objects=trust_objects)
    coordinator = make_coordinator(process_group, no_dist=no_dist, errors=RANK_ERRORS)
    with coordinator:
        run = _Load({}, checkpoint_id, adopt_reader(storage_reader), planner, coordinator, Cooperation(cooperative))
        run.run()
    return run.values


@dataclass(slots=True)
class _Load:
    """The state of one load on one rank."""

    state_dict: dict[str, Any]
    checkpoint_id: CheckpointId | None
    reader: StorageReader | None
    planner: LoadPlanner
    coordinator: Coordinator
    cooperation: Cooperation
    template: dict[str, Any] = field(default_factory=dict)
    stateful: dict[str, Stateful] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    metadata: Metadata | None = None
    plan: LoadPlan | None = None
    rank_values: RankValues | None = None
    exchanges: bool = True
    """Whether the ranks' plans go through the coordinator; if all global steps are identities, no plan is sent."""

    def run(self) -> LoadReport:
        place = self.checkpoint_id if self.checkpoint_id is not None else self.reader_can().checkpoint_id
        events = Operation("load", self.coordinator, place)
        with events.phase("total") as total:
            folder = absolute_id_for(self.reader, self.checkpoint_id)  # ranks may have different working folders
            self.coordinator.agree("load", os.fspath(folder or ""), describe="checkpoint ids")
            prepared = self.coordinator.all_gather("state_dict", self.prepare)
            self.exchanges = any(changes for changes, _ in prepared)
            self.cooperation.choose([offer for _, offer in prepared], speaks=self.coordinator.is_coordinator)
            for attempt in range(_MAX_ATTEMPTS):
                with events.phase("plan") as planning:
                    if (connect_ranks := self.reader_can().connect_ranks) is not None:
                        connect_ranks(self.coordinator)
                    # Planned anew, each rank reads the index, and notices if its storage is another one.
                    shared = None if attempt else self.cooperation.share_metadata(self.coordinator, self._reader())
                    local = planning.timed(partial(self.plan_locally, shared))
                    plan = self.coordinator.reduce_scatter("plan", local, self.plan_globally)
                self.plan = plan or self.plan
                with events.phase("read") as reading:
                    if self.cooperation.together:
                        replaced = self.cooperation.read(
                            self.coordinator, self._reader(), self.finish_plan, self.planner
                        )
                    else:
                        read = reading.timed(partial(self.read, last=attempt == _MAX_ATTEMPTS - 1))
                        replaced = any(self.coordinator.all_gather("read", read))
                    reading.bytes = total.bytes = self.reader_can().bytes_read
                    reading.bytes_received = total.bytes_received = self.cooperation.bytes_received
                if not replaced:
                    break
            else:
                raise DcpError(f"the checkpoint was replaced {_MAX_ATTEMPTS} times while it was loaded; load again")
            report = self.report()
            with events.phase("load_state_dict") as applying:
                self.coordinator.all_gather("load_state_dict", applying.timed(self.apply))
        return report

    def prepare(self) -> tuple[bool, Offer]:
        """Prepare the template; returns whether this rank's planner or reader may change the global plan, and an offer.

        The offer says whether this rank can read together with the others.
        """
        check_state_dict(self.state_dict)  # a model in its place matters more than a missing checkpoint id
        self.reader = resolve_reader(self.reader, self.checkpoint_id)
        self.template = with_states(self.state_dict)
        self.stateful = {key: value for key, value in self.state_dict.items() if is_stateful(value)}
        methods = (self.planner.create_global_plan, self.reader.prepare_global_plan)
        changes = any(getattr(method, "__func__", None) not in _IDENTITIES for method in methods)
        return changes, self.cooperation.offer(self.reader, self.coordinator.world_size)

    def plan_locally(self, shared: Metadata | None) -> tuple[LoadPlan | None, str | None]:
        reader = self._reader()
        self.metadata = shared or read_metadata(reader, self.coordinator.rank)
        self.restore_rank_values()
        self.values = dict(self.template)
        names, coordinator = self.metadata.state_dict_metadata.keys(), self.coordinator
        self.rank_values = RankValues(self.values, names, coordinator.rank, coordinator.world_size)
        if refused := self.rank_values.refused:
            raise LoadMismatchError([LoadProblem(name, "ranks", message) for name, message in refused.items()])
        self.planner.set_up_planner(self.values, self.metadata, coordinator.is_coordinator)
        knows_ranks = takes(reader.set_up_storage_reader, "kwargs")
        of_rank = {"rank": coordinator.rank, "use_collectives": True} if knows_ranks else {}
        reader.set_up_storage_reader(self.metadata, coordinator.is_coordinator, **of_rank)
        self.plan = reader.prepare_local_plan(self.planner.create_local_plan())
        return self.plan if self.exchanges else None, _save_id(self.metadata)

    def restore_rank_values(self) -> None:
        """Restore the `PerRank` values of the template, with the loaded values in them."""
        if self.rank_values is not None:
            self.rank_values.restore()

    def plan_globally(self, found: list[tuple[LoadPlan | None, str | None]]) -> list[LoadPlan | None]:
        save_ids = {save_id for _, save_id in found}
        if len(save_ids) > 1:
            raise DcpError(
                f"ranks see different checkpoints under one id (save ids {sorted(map(str, save_ids))}): it is being "
                "replaced, or the ranks do not share their storage; load again"
            )
        plans = [plan for plan, _ in found if plan is not None]
        if not self.exchanges:
            return [None] * len(found)
        return [*self._reader().prepare_global_plan(self.planner.create_global_plan(plans))]

    def finish_plan(self) -> LoadPlan:
        """Return this rank's plan, as its planner has finished it."""
        if self.plan is None:
            raise DcpError("the load was not planned")
        return self.planner.finish_plan(self.plan)

    def read(self, *, last: bool) -> bool:
        """Read this rank's items; True if the load must be planned again, as the checkpoint was replaced meanwhile."""
        reader, plan = self._reader(), self.finish_plan()
        try:
            reader.read_data(plan, self.planner).wait()
        except CheckpointNotFoundError as error:
            if not isinstance(error, CheckpointReplacedError):
                last = last or _save_id(read_metadata(reader, self.coordinator.rank)) == _save_id(self.metadata)
            if last:
                raise
            return True
        return False

    def apply(self) -> None:
        self.restore_rank_values()
        if self.rank_values is not None:
            self.rank_values.apply()
        for key, value in in_shared_order(self.stateful):
            value.load_state_dict(self.values[key])
        for key, value in self.values.items():
            if key not in self.stateful:
                self.state_dict[key] = value

    def report(self) -> LoadReport:
        did, reader_did = abilities(self.planner, LoadPlannerAbilities), self.reader_can()
        local: LocalLoadPlan | None = did.local_load
        items = self.plan.items if self.plan is not None else []
        found = LoadReport(
            unverified=tuple(sorted(reader_did.unverified_keys or ())),
            bytes_read=reader_did.bytes_read or 0,
            save_id=_save_id(self.metadata),
            initialised=tuple(sorted(did.initialised or ())),
            per_rank=dict(sorted(self.rank_values.taken.items())) if self.rank_values is not None else {},
            derived=dict(sorted(self.rank_values.derived.items())) if self.rank_values is not None else {},
            cooperative=self.cooperation.together,
            cooperative_reason=self.cooperation.reason,
            bytes_received=self.cooperation.bytes_received,
        )
        if local is None:  # a planner of another kind
            used = {item.storage_index.fqn for item in items}
            stored = self.metadata.state_dict_metadata if self.metadata is not None else {}
            found.loaded = tuple(sorted({item.dest_index.fqn for item in items}))
            found.unexpected = tuple(sorted(stored.keys() - used))
            return found
        found.loaded, found.missing = tuple(sorted(local.matched)), tuple(sorted(local.missing))
        found.unexpected = tuple(sorted(local.unexpected))
        found.overlapping = tuple(sorted(local.overlapping))
        found.cast, found.resized, found.renamed = dict(local.cast), dict(local.resized), dict(local.renamed)
        return found

    def reader_can(self) -> ReaderAbilities:
        """Return the reader's optional abilities at this moment, beyond the methods of `StorageReader`."""
        return abilities(self.reader, ReaderAbilities)

    def _reader(self) -> StorageReader:
        if self.reader is None:
            raise DcpError("the load was not prepared")
        return self.reader


def _load(
    state_dict: dict[str, Any],
    checkpoint_id: CheckpointId | None,
    reader: StorageReader | None,
    planner: LoadPlanner | None,
    coordinator: Coordinator,
    cooperation: Cooperation,
) -> LoadReport:
    with coordinator:  # an error in here reaches the other ranks
        planner = adopt_load_planner(planner) or DefaultLoadPlanner()
        run = _Load(state_dict, checkpoint_id, adopt_reader(reader), planner, coordinator, cooperation)
        try:
            return run.run()
        finally:
            run.restore_rank_values()


def _save_id(metadata: Metadata | None) -> str | None:
    """Return the save id of a checkpoint; None if it has none, or its metadata was not read yet."""
    return None if metadata is None or metadata.storage_meta is None else metadata.storage_meta.save_id
