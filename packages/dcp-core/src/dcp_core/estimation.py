"""Estimate bytes, files, memory and time of a save from its plan, without writing."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from dcp_base.escaping import printable_bytes
from dcp_core.arguments import absolute_id_for, adopted, resolve_storage
from dcp_core.calls import outside_compile, refuse_path
from dcp_core.errors import UnsupportedValueError
from dcp_core.events import Operation, write_rate
from dcp_core.planning.save_planner import DefaultSavePlanner
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import Metadata
from dcp_core.records.protocols import (
    CheckpointId,
    SavePlan,
    SavePlanner,
    StorageWriter,
    WriteResult,
    set_up_save_planner,
    with_states,
)
from dcp_core.state_dict.per_rank import with_rank_values
from dcp_core.storage.storage_writer import ByteStorageWriter, SavePlacement, column_requests
from dcp_core.tables.metadata_columns import written_index
from dcp_core.tables.plan_columns import WrittenColumns, columns_of
from dcp_core.tensors.kinds import children_of, is_dtensor, rebuilt, with_local
from dcp_io import StoreBackend
from dcp_io.writing.write_engine import measure_items
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.folders.folder import data_file_prefix
from dcp_manifest.index.stored_items import StoredItems
from dcp_ranks import Coordinator, make_coordinator
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS

_ANYWHERE = "estimate"


class EstimatingSaver(Protocol):
    """Saver that can compute the memory of its copies.

    The optional `bytes_to_wait_for(state_dict)` returns the bytes beyond that memory, for which `save` blocks.
    """

    def bytes_to_stage(self, state_dict: dict[str, Any]) -> int:
        """Return the bytes of this rank's copy, without copying."""
        ...


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """One rank's part of an estimate."""

    bytes: int
    """Bytes that the rank writes; the coordinator's include the index."""
    files: int
    """Counted like `bytes`."""
    staging_bytes: int
    """Memory of an asynchronous saver's copy; 0 for `save`."""
    seconds: float | None
    """Seconds of writing, at the rate of this rank's last save of at least 1 MiB to the same scheme, or None."""
    index_bytes: int = 0
    """0 except on the coordinator."""
    waiting_bytes: int = 0
    """Bytes beyond an asynchronous saver's staging memory: its `save` waits until they are written."""
    waiting_seconds: float | None = 0.0
    """Seconds of waiting for these bytes; None if the rate is unknown."""


@dataclass(frozen=True, slots=True, repr=False)
class Estimate:
    """Estimate of a save, in rank order; an upper bound if the writer compresses."""

    ranks: tuple[RankEstimate, ...]
    is_upper_bound: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(rank.bytes for rank in self.ranks)

    @property
    def files(self) -> int:
        """Number of files, with the index."""
        return sum(rank.files for rank in self.ranks)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index."""
        return sum(rank.index_bytes for rank in self.ranks)

    @property
    def staging_bytes(self) -> int:
        """Largest staging memory of any rank, in bytes."""
        return max(rank.staging_bytes for rank in self.ranks)

    @property
    def seconds(self) -> float | None:
        """Seconds on the slowest rank; None if any is None."""
        times = [rank.seconds for rank in self.ranks if rank.seconds is not None]
        return max(times) if len(times) == len(self.ranks) else None

    @property
    def waiting_seconds(self) -> float | None:
        """Longest wait of any rank; None if any is None."""
        times = [rank.waiting_seconds for rank in self.ranks if rank.waiting_seconds is not None]
        return max(times) if len(times) == len(self.ranks) else None

    def __repr__(self) -> str:
        count = len(self.ranks)
        most = max(rank.bytes - rank.index_bytes for rank in self.ranks)
        # The repr of the metadata that `save` returns counts data files only; count the index separately here.
        data_bytes, files = self.bytes - self.index_bytes, self.files - sum(rank.index_bytes > 0 for rank in self.ranks)
        in_files = f"in {files:,} data file{'' if files == 1 else 's'}"
        text = f"{'at most ' * self.is_upper_bound}{printable_bytes(data_bytes)} {in_files}"
        if count > 1:
            text += f", up to {printable_bytes(most)} on each of {count:,} ranks"
        text += f", and an index of {printable_bytes(self.index_bytes)}"
        if self.staging_bytes:
            text += f", {printable_bytes(self.staging_bytes)} of memory for a copy"
        beyond = max(rank.waiting_bytes for rank in self.ranks)
        if beyond:
            wait = "" if self.waiting_seconds is None else f" (about {self.waiting_seconds:.3g} s)"
            text += f", training waits until {printable_bytes(beyond)} are written{wait}"
        return f"<Estimate: {text}{'' if self.seconds is None else f', about {self.seconds:.3g} s'}>"


@outside_compile
def estimate(
    state_dict: dict[str, Any],
    saver: EstimatingSaver | None = None,
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Estimate:
    """Estimate what a save would write and need, without writing.

    ```python
    import torch
    from dcp_core import estimate

    found = estimate({"weight": torch.ones(1000, 1000), "step": 7})
    assert 4_000_000 < found.bytes < 4_010_000
    print(found)  # <Estimate: 3.82 MiB in 1 data file, and an index of 5.26 KiB>
    ```

    Sizes are exact without compression and upper bounds with it. Only objects, and tensors below 64 KiB, are
    serialized. Meta tensors count like others.

    `saver` is an asynchronous saver, such as `dcp_async.AsyncSaver`, with copies that count; it refuses meta tensors.
    Other arguments are as for `save`: `checkpoint_id` selects the writer and the earlier saves for the rate (None: a
    local directory). The writer is not changed, the storage not accessed.

    Returns:
        The same estimate on all ranks. Times cover the phase `write`.

    Raises:
        UnsupportedValueError: The writer is not a `ByteStorageWriter` or overrides its write methods, or a value cannot
            be saved.
        CheckpointException: A rank failed; raised on every rank.

    Ranks: every rank; collective.
    """
    refuse_path("estimate", saver, "saver")
    if saver is not None and not callable(getattr(saver, "bytes_to_stage", None)):
        raise TypeError(
            f"estimate(): a {type(saver).__name__} is not a saver; pass a storage writer as storage_writer="
        )
    with make_coordinator(process_group, no_dist=no_dist, timeout_seconds=timeout_seconds) as coordinator:
        writer = adopted(storage_writer, StorageWriter) or resolve_storage(None, checkpoint_id or _ANYWHERE, "writer")
        run = _Estimation(writer, adopted(planner, SavePlanner) or DefaultSavePlanner(), coordinator)
        place = absolute_id_for(writer, checkpoint_id)
        with Operation("estimate", coordinator, checkpoint_id).phase("total"):
            coordinator.agree("estimate", lambda: os.fspath(place or ""), describe="checkpoint ids")
            plan = coordinator.reduce_scatter("plan", lambda: run.plan(state_dict, saver), run.plan_globally)
            rate = write_rate(place or _ANYWHERE)
            return coordinator.all_reduce("estimate", lambda: run.measure(plan, rate), run.add_up)


@dataclass(slots=True)
class _Part:
    file_bytes: list[int]
    staging_bytes: int
    waiting_bytes: int
    rate: float | None
    results: Sequence[WriteResult]

    def estimate(self, *index: int) -> RankEstimate:
        total, waiting = sum([*self.file_bytes, *index]), self.waiting_bytes
        seconds = None if self.rate is None else total / self.rate
        wait = 0.0 if not waiting else None if self.rate is None else waiting / self.rate
        files = len(self.file_bytes) + len(index)
        return RankEstimate(total, files, self.staging_bytes, seconds, sum(index), waiting, wait)


@dataclass(slots=True)
class _Estimation:
    writer: StorageWriter
    planner: SavePlanner
    coordinator: Coordinator
    metadata: Metadata | None = None
    staging_bytes: int = 0
    waiting_bytes: int = 0

    def byte_writer(self) -> ByteStorageWriter:
        writer, own = self.writer, ("write_data", "_write", "finish")
        if not isinstance(writer, ByteStorageWriter) or any(
            getattr(type(writer), name) is not getattr(ByteStorageWriter, name) for name in own
        ):
            kind = type(writer).__qualname__
            raise UnsupportedValueError(f"{kind} lays out its own files: their sizes are unknown before a save")
        return writer

    def plan(self, state_dict: dict[str, Any], saver: EstimatingSaver | None) -> SavePlan:
        writer = self.byte_writer()
        values: dict[str, Any] = with_rank_values(with_states(state_dict), self.coordinator.rank)
        if saver is not None:
            self.staging_bytes = saver.bytes_to_stage(values)
            self.waiting_bytes = getattr(saver, "bytes_to_wait_for", lambda _: 0)(values)
        is_coordinator = self.coordinator.is_coordinator
        values = _with_stand_ins(values, {})
        set_up_save_planner(self.planner, values, writer.storage_meta(), is_coordinator=is_coordinator)
        plan = self.planner.create_local_plan()
        return plan if writer.stores_aliases else replace(plan, aliases=None)

    def plan_globally(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self.metadata = self.planner.create_global_plan(plans)
        save_id = secrets.token_hex(8)
        return [
            replace(plan, storage_data=SavePlacement(save_id, data_file_prefix(rank), 1, len(plans)))
            for rank, plan in enumerate(plans)
        ]

    def measure(self, plan: SavePlan, rate: float | None) -> _Part:
        writer = self.byte_writer()
        plan = replace(self.planner.finish_plan(plan), storage_data=plan.storage_data)
        # A separate backend leaves the writer unchanged.
        backend = writer._open(writer._id_to_open())  # noqa: SLF001 - of this package
        stored, sizes = lay_out(plan, self.planner, backend)
        results = LazyList(WrittenColumns(columns_of(plan.items), stored))
        return _Part(sizes, self.staging_bytes, self.waiting_bytes, rate, results)

    def add_up(self, parts: list[_Part]) -> Estimate:
        if self.metadata is None:
            raise RuntimeError("there is no global plan")
        writer = self.byte_writer()
        index = written_index(self.metadata, [part.results for part in parts])
        index.info = SavePlacement(secrets.token_hex(8), "", 1, len(parts)).info(time.time_ns())
        index_bytes = len(encode(index, interop=writer._interop))  # noqa: SLF001 - of this package
        ranks = [
            part.estimate(index_bytes) if rank == self.coordinator.rank else part.estimate()
            for rank, part in enumerate(parts)
        ]
        return Estimate(tuple(ranks), writer.compresses)


def lay_out(plan: SavePlan, planner: SavePlanner, backend: StoreBackend) -> tuple[StoredItems, list[int]]:
    """Return where a final plan's items would be in files, with meaningless CRCs, and the files' sizes."""
    placement = plan.storage_data
    stored = measure_items(
        list(column_requests(columns_of(plan.items), planner)),
        prefix=placement.prefix,
        save_id=placement.save_id,
        layout=backend.layout,
        threads=backend.threads,
        single_file=backend.single_file,
    )
    ends = np.zeros(len(stored.files), np.uint64)
    np.maximum.at(ends, stored.columns.file, stored.columns.offset + stored.columns.length)
    return stored, ends.tolist()


def _with_stand_ins(value: Any, known: dict[Hashable, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            return value
        if is_dtensor(value):
            return with_local(value, _with_stand_ins(value.to_local(), known))
        return _stand_in(value, known) if type(value) in (torch.Tensor, torch.nn.Parameter) else value
    children = children_of(value)
    if not children:
        return value
    found = [_with_stand_ins(child, known) for _, child in children]
    changed = any(new is not child for new, (_, child) in zip(found, children, strict=True))
    return rebuilt(value, found) if changed else value


def _stand_in(tensor: torch.Tensor, known: dict[Hashable, torch.Tensor]) -> torch.Tensor:
    memory = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype, tensor.size(), tensor.stride())  # noqa: SLF001
    if memory not in known:
        known[memory] = torch.zeros(tensor.dtype.itemsize, dtype=torch.uint8, device="cpu").view(tensor.dtype)[0]
    return known[memory].expand(tensor.size())
