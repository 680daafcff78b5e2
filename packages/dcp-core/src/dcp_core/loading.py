"""`load` and `load_keys`: the calls to planner, storage reader and coordinator.

Source: torch 2.13 `torch.distributed.checkpoint.state_dict_loader`.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dcp_core.arguments import absolute_id_for, adopted, read_metadata, resolve_storage
from dcp_core.calls import outside_compile, with_positional_storage
from dcp_core.errors import CheckpointNotFoundError, CorruptCheckpointError, DcpError
from dcp_core.events import Operation, Phase
from dcp_core.planning.load_planner import DefaultLoadPlanner, EmptyStateDictLoadPlanner
from dcp_core.planning.load_report import (
    SHOWN_PROBLEMS,
    LoadMismatchError,
    LoadProblem,
    LoadReport,
    surplus_bits,
    warn_of_surplus,
)
from dcp_core.planning.read_items import boxes_of
from dcp_core.records.metadata import Metadata
from dcp_core.records.protocols import (
    CheckpointId,
    LoadPlan,
    LoadPlanner,
    PartialState,
    Stateful,
    StorageReader,
    check_state_dict,
    in_shared_order,
    is_stateful,
    takes,
    with_states,
)
from dcp_core.shards.shards import is_ordinary
from dcp_core.state_dict.per_rank import RankValues, rank_places
from dcp_core.storage.byte_storage import collector_paused
from dcp_core.storage.cooperation import Cooperation, Offer
from dcp_core.storage.storage_reader import ByteStorageReader
from dcp_core.tensors.devices import finish_computing
from dcp_core.tensors.kinds import as_dtensor, is_dtensor
from dcp_core.tensors.tensor_memory import byte_view
from dcp_io import CheckpointReplacedError
from dcp_ranks import Coordinator, PeerOptions, make_coordinator
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS

_MAX_ATTEMPTS = 3
# Global planning steps that return the plans unchanged.
_IDENTITIES = (DefaultLoadPlanner.create_global_plan, ByteStorageReader.prepare_global_plan)


@with_positional_storage("storage_reader")
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
    """Load a checkpoint into a state dict, in place, resharding tensors if necessary.

    ```python
    import torch
    from dcp_core import load, save

    save({"weight": torch.ones(3), "step": 100}, checkpoint_id="step-100")
    state = {"weight": torch.zeros(3), "step": 0}
    report = load(state, checkpoint_id="step-100")
    assert state["step"] == 100 and state["weight"].sum() == 3
    ```

    Args:
        state_dict: Template. Tensors and shards are filled in place, empty dicts and lists from the checkpoint; objects
            are replaced. A `Stateful` provides a template and gets the loaded state.
        checkpoint_id: Directory, or URI that an installed storage handles.
        storage_reader: Reader; None to choose one by `checkpoint_id`.
        planner: None for a `DefaultLoadPlanner`.
        process_group: Ranks that load together; None for all.
        no_dist: Whether this process loads alone, even if process groups exist.
        timeout_seconds: Wait for other ranks in one phase, from this rank's arrival.
        peers: How ranks detect others' death before the timeout.
        cooperative: Whether one rank reads each stored byte and sends it to the others, with the package dcp-exchange.
            None: for object stores and network file systems, if it is installed.

    Returns:
        Report of this rank's load (None in stock).

    Raises:
        CheckpointException: A rank failed; raised on every rank, with rank, phase and traceback. The message names
            tensors that have changed.
        Exception: With one process: the error itself, such as LoadMismatchError, CorruptCheckpointError or
            CheckpointNotFoundError.

    Ranks: every rank; collective.
    """
    coordinator = make_coordinator(process_group, no_dist=no_dist, timeout_seconds=timeout_seconds, peers=peers)
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
    """Deprecated form of `load`; `coordinator_rank` counts within the group."""
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
    """Load without calling `storage_reader.reset`, as stock's private `_load_state_dict` does."""
    coordinator = make_coordinator(process_group, no_dist=no_dist, coordinator_rank=coordinator_rank)
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
    """Load keys without a template, as whole CPU tensors in the saved nesting.

    ```python
    import torch
    from dcp_core import load_keys, save

    save({"model": {"weight": torch.ones(3)}, "step": 100}, checkpoint_id="step-100")
    state = load_keys("model", checkpoint_id="step-100")
    assert state["model"]["weight"].tolist() == [1, 1, 1]
    ```

    `keys` are FQNs or prefixes (`"model"` loads everything under `model.`), None for the whole checkpoint. For
    `allow_globals` and `trust_objects` see `DefaultLoadPlanner`, for other arguments `load`.

    Raises:
        KeyError: A key matches nothing.

    Ranks: every rank; collective.
    Source: torch 2.13 `state_dict_loader._load_state_dict_from_keys`.
    """
    planner = EmptyStateDictLoadPlanner(keys, allow_globals=tuple(allow_globals), trust_objects=trust_objects)
    coordinator = make_coordinator(process_group, no_dist=no_dist)
    with coordinator:
        run = _Load(
            {}, checkpoint_id, adopted(storage_reader, StorageReader), planner, coordinator, Cooperation(cooperative)
        )
        run.run()
    return run.values


@dataclass(slots=True)
class _Load:
    state_dict: dict[str, Any]
    checkpoint_id: CheckpointId | None
    storage_reader: StorageReader | None
    planner: LoadPlanner
    coordinator: Coordinator
    cooperation: Cooperation
    reader: StorageReader = field(init=False)
    template: dict[str, Any] = field(default_factory=dict)
    stateful: dict[str, Stateful] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    metadata: Metadata | None = None
    plan: LoadPlan = field(init=False)
    boxes: Callable[[], Mapping[str, Any] | None] | None = None
    """Of this rank's shards; None if the planner may look at others."""
    rank_values: RankValues | None = None
    exchanges: bool = True
    """Whether plans are sent; not if all global steps are identities."""

    def run(self) -> LoadReport:
        asked, coordinator = self.storage_reader, self.coordinator
        place = self.checkpoint_id if self.checkpoint_id is not None or asked is None else asked.checkpoint_id
        events = Operation("load", coordinator, place)
        with events.phase("total") as total:
            # Ranks may have different working directories.
            folder = partial(absolute_id_for, asked, self.checkpoint_id)
            coordinator.agree("load", lambda: os.fspath(folder() or ""), describe="checkpoint ids")
            prepared = coordinator.all_gather("state_dict", self.prepare)
            self.exchanges = True in [changes for changes, _ in prepared]
            self.cooperation.choose([offer for _, offer in prepared], speaks=coordinator.is_coordinator)
            for attempt in range(_MAX_ATTEMPTS):
                with events.phase("plan") as planning:
                    self.plan_together(planning, anew=attempt > 0)
                with events.phase("read") as reading:
                    replaced = self.read_together(reading, last=attempt == _MAX_ATTEMPTS - 1)
                    total.bytes, total.bytes_received = reading.bytes, reading.bytes_received
                if not replaced:
                    break
            else:
                raise DcpError(f"the checkpoint was replaced {_MAX_ATTEMPTS} times while it was loaded; load again")
            report = self.report()
            with events.phase("load_state_dict") as applying:
                surplus = coordinator.all_gather("load_state_dict", applying.timed(self.apply))
            if all(surplus) and coordinator.is_coordinator and self.metadata is not None:
                warn_of_surplus(self.metadata, surplus)
        return report

    def plan_together(self, planning: Phase, *, anew: bool) -> None:
        self.reader.connect_ranks(self.coordinator)
        shared = None
        # In a second attempt, each rank reads the index, to detect that its storage differs.
        if self.cooperation.shares_index and not anew:
            shared = self.cooperation.share_metadata(self.coordinator, self.reader, self.boxes)
        local = planning.timed(partial(self.plan_locally, shared))
        self.plan = self.coordinator.reduce_scatter("plan", local, self.plan_globally) or self.plan

    def read_together(self, reading: Phase, *, last: bool) -> bool:
        """Read all ranks' items; return whether a newer save replaced the checkpoint."""
        coordinator, reader = self.coordinator, self.reader
        if self.cooperation.together:
            finish = partial(self.planner.finish_plan, self.plan)
            replaced = self.cooperation.read(coordinator, reader, finish, self.planner)
        else:
            replaced = any(coordinator.all_gather("read", reading.timed(partial(self.read, last=last))))
        reading.bytes, reading.bytes_received = reader.bytes_read, self.cooperation.bytes_received
        return replaced

    def prepare(self) -> tuple[bool, Offer]:
        check_state_dict(self.state_dict)  # report a wrong state dict before a missing checkpoint id
        self.reader = resolve_storage(self.storage_reader, self.checkpoint_id, "reader")
        self.template = with_states(self.state_dict)
        self.stateful = {key: value for key, value in self.state_dict.items() if is_stateful(value)}
        if type(self.planner) is DefaultLoadPlanner:
            is_flat, keys = not self.planner.flatten_state_dict, self.planner.key_map
            self.boxes = partial(boxes_of, self.template, keys, is_flat=is_flat)
        methods = (self.planner.create_global_plan, self.reader.prepare_global_plan)
        changes = [method for method in methods if getattr(method, "__func__", None) not in _IDENTITIES]
        return bool(changes), self.cooperation.offer(self.reader, self.coordinator.world_size)

    def plan_locally(self, shared: Metadata | None) -> tuple[LoadPlan | None, str | None]:
        reader, rank, is_part = self.reader, self.coordinator.rank, False
        if shared is None and isinstance(reader, ByteStorageReader) and reader.shares_index:
            index = reader.read_part(self.boxes)
            shared, is_part = reader.use_index(index), index.is_part
        try:
            return self.plan_by(shared or read_metadata(reader, rank))
        except (LoadMismatchError, CorruptCheckpointError) as error:
            kinds = {problem.kind for problem in error.problems} if isinstance(error, LoadMismatchError) else {"hole"}
            if not (is_part and "hole" in kinds and isinstance(self.planner, DefaultLoadPlanner)):
                raise
            # The planner looked at other chunks, as for names of an old PyTorch. It makes no tensor from meta again.
            self.planner._initialise([*self.planner.state_dict])  # noqa: SLF001 - of this package
        return self.plan_by(read_metadata(reader, rank))

    def plan_by(self, metadata: Metadata) -> tuple[LoadPlan | None, str | None]:
        reader, self.metadata = self.reader, metadata
        if self.rank_values is not None:
            self.rank_values.restore()
        self.values, coordinator = dict(self.template), self.coordinator
        if places := [*rank_places(self.values)]:
            names = self.metadata.state_dict_metadata.keys()
            self.rank_values = RankValues(places, names, coordinator.rank, coordinator.world_size)
            if refused := self.rank_values.refused:
                raise LoadMismatchError([LoadProblem(name, "ranks", message) for name, message in refused.items()])
        with collector_paused():
            self.planner.set_up_planner(self.values, self.metadata, coordinator.is_coordinator)
            knows_ranks = takes(reader.set_up_storage_reader, "kwargs")
            of_rank = {"rank": coordinator.rank, "use_collectives": True} if knows_ranks else {}
            reader.set_up_storage_reader(self.metadata, coordinator.is_coordinator, **of_rank)
            self.plan = reader.prepare_local_plan(self.planner.create_local_plan())
        return self.plan if self.exchanges else None, _save_id(self.metadata)

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
        return [*self.reader.prepare_global_plan(self.planner.create_global_plan(plans))]

    def read(self, *, last: bool) -> bool:
        """Read this rank's items; return whether the checkpoint was replaced."""
        reader, plan = self.reader, self.planner.finish_plan(self.plan)
        if torch.accelerator.is_available():
            finish_computing()  # reading threads must not write before it
        try:
            reader.read_data(plan, self.planner).wait()
        except CheckpointNotFoundError as error:
            if not isinstance(error, CheckpointReplacedError):
                last = last or _save_id(read_metadata(reader, self.coordinator.rank)) == _save_id(self.metadata)
            if last:
                raise
            return True
        return False

    def apply(self) -> bytes:
        if self.rank_values is not None:
            self.rank_values.restore()
            self.rank_values.apply()
        local = self.planner.local_load
        # Readers of other kinds may read together with other ranks, whose templates need not overlap.
        if local is not None and local.overlapping and type(self.reader).read_data is ByteStorageReader.read_data:
            self.warn_of_overwritten(local.overlapping)
        for key, value in in_shared_order(self.stateful):
            absent = [path[1:] for path in local.absent if path[0] == key] if local is not None else []
            state = self.values[key]
            value.load_state_dict(PartialState(state, absent) if absent and isinstance(state, dict) else state)
        for key, value in self.values.items():
            if key not in self.stateful:
                self.state_dict[key] = value
        if local is None or self.metadata is None or not local.unexpected:
            return b""
        taken = () if self.rank_values is None else self.rank_values.taken
        return surplus_bits(self.metadata, self.template, local.unexpected, taken)

    def warn_of_overwritten(self, pairs: list[tuple[str, str]]) -> None:
        planner: Any = copy.copy(self.planner)
        shared = {key: as_dtensor(planner.state_dict[key]) for pair in pairs for key in pair}
        known = {key: value for key, value in shared.items() if is_dtensor(value) or is_ordinary(value)}
        # Each is read again, into memory of its own.
        whole = {key: value.detach().resolve_conj().clone() for key, value in known.items()}
        planner.state_dict = {**planner.state_dict, **whole}
        items = [item for item in self.plan.items if item.dest_index.fqn in whole]
        self.reader.read_data(LoadPlan(items), planner).wait()
        changed = {key for key, stored in whole.items() if not torch.equal(_bytes(stored), _bytes(shared[key]))}
        lost = [f"{one!r} and {other!r}" for one, other in pairs if {one, other} & changed]
        if lost:
            text = (
                f"{len(lost)} pair(s) of tensors share memory in the template and differ in the checkpoint, so one has "
                f"overwritten a part of the other: {', '.join(lost[:SHOWN_PROBLEMS])}. Put a copy (`.clone()`) of "
                "one of them into the template, or leave it out"
            )
            warnings.warn(text, UserWarning, stacklevel=2)

    def report(self) -> LoadReport:
        local, reader = self.planner.local_load, self.reader
        found = LoadReport(
            unverified=tuple(sorted(reader.unverified_keys)),
            bytes_read=reader.bytes_read or 0,
            save_id=_save_id(self.metadata),
            initialised=tuple(sorted(self.planner.initialised)),
            per_rank=dict(sorted(self.rank_values.taken.items())) if self.rank_values is not None else {},
            derived=dict(sorted(self.rank_values.derived.items())) if self.rank_values is not None else {},
            cooperative=self.cooperation.together,
            cooperative_reason=self.cooperation.reason,
            bytes_received=self.cooperation.bytes_received,
        )
        if local is None:  # another planner class
            items = self.plan.items
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


def _load(
    state_dict: dict[str, Any],
    checkpoint_id: CheckpointId | None,
    reader: StorageReader | None,
    planner: LoadPlanner | None,
    coordinator: Coordinator,
    cooperation: Cooperation,
) -> LoadReport:
    with coordinator:  # sends errors to the other ranks
        planner = adopted(planner, LoadPlanner) or DefaultLoadPlanner()
        run = _Load(state_dict, checkpoint_id, adopted(reader, StorageReader), planner, coordinator, cooperation)
        try:
            return run.run()
        finally:
            if run.rank_values is not None:
                run.rank_values.restore()


def _bytes(value: Any) -> torch.Tensor:
    local = (value.to_local() if is_dtensor(value) else value).detach()
    return byte_view(local.int_repr() if local.is_quantized else local)  # the quantizer is each tensor's own


def _save_id(metadata: Metadata | None) -> str | None:
    return None if metadata is None or metadata.storage_meta is None else metadata.storage_meta.save_id
