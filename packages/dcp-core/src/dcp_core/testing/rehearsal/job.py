"""`Job`: a save of tensors without bytes by all ranks of a `World`, each tensor cut by rows over all of them.

The first rank with shards of certain sizes runs the whole code. Ranks with equal sizes take over its local plan, with
offsets of their own, and the layout of its files. Messages, the global plan, files and the index are made by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dcp_core.planning.save_planner import DefaultSavePlanner
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import StorageMeta, TensorProperties, dtype_of
from dcp_core.records.protocols import SavePlan, SavePlanner, WriteResult
from dcp_core.saving import save
from dcp_core.shards.shards import LocalShard, LocalTensor
from dcp_core.storage.storage_writer import SavePlacement, column_requests
from dcp_core.tables.plan_columns import PlanColumns, WrittenColumns, columns_of
from dcp_core.testing.rehearsal.clock import Task
from dcp_core.testing.rehearsal.world import VirtualWriter, World
from dcp_io import StoreBackend
from dcp_io.saves.save_files import data_mark
from dcp_io.writing.write_engine import measure_items
from dcp_manifest.index.stored_items import StoredItems
from dcp_manifest.types import I64

__all__ = ["WRITING", "Job", "Tensor"]

Tensor = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype."""
WRITING = "own files"
"""Name in `World.phases` of the time in which a rank writes its data files."""
# Ranks write at the same time, but the disk serves one request after the other.
_PIECE_BYTES, _MOST_PIECES = 16 << 20, 16


@dataclass(frozen=True, slots=True)
class _Plan:
    """A local plan, and for each offset that differs between ranks, its position and its rank's rows."""

    plan: SavePlan
    columns: PlanColumns
    positions: I64
    steps: I64

    def of_rank(self, rank: int) -> SavePlan:
        table = self.columns.table
        offsets = table.chunk_offsets.copy()
        offsets[self.positions] = rank * self.steps
        columns = PlanColumns(replace(table, chunk_offsets=offsets), self.columns.whole, self.columns.object_bytes)
        columns.order = self.columns.order
        return replace(self.plan, items=columns.items())


class Job:
    """A job's state, and the plans and file layouts that its ranks share."""

    def __init__(self, world: World, tensors: Sequence[Tensor], checkpoint_id: str = "rehearsal") -> None:
        self.world, self.checkpoint_id = world, checkpoint_id
        ranks = world.cluster.ranks
        self.tensors = [
            (name, torch.Size(shape), dtype_of(dtype), -(-shape[0] // ranks) if shape and 0 not in shape else 0)
            for name, shape, dtype in tensors
        ]
        self._rows = sorted({(size[0], step) for _, size, _, step in self.tensors if step})
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self.ends: dict[int, float] = {}
        """Rank → when its call has returned or raised, also that of a killed one."""
        self._layouts: dict[tuple[bytes, ...], tuple[StoredItems, str]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(size.numel() * dtype.itemsize for _, size, dtype, _ in self.tensors)

    @property
    def whole_ranks(self) -> int:
        """Ranks that have run the whole code."""
        return len(self._plans)

    def run(self, starts: Sequence[float] = ()) -> list[Task]:
        """Save once on all ranks."""
        return self.world.run(self._save, starts=starts)

    def _save(self, rank: int) -> None:
        try:
            save({}, storage_writer=_Writer(self, rank), planner=_Planner(self, rank))
        finally:
            self.ends[rank] = self.world.clock.now

    def state(self, rank: int) -> dict[str, Any]:
        """Return a rank's state dict. Tensors have one element in memory each."""
        made: dict[str, Any] = {}
        for name, size, dtype, step in self.tensors:
            if not step:
                made[name] = torch.zeros(size, dtype=dtype)
                continue
            low, high = (min(size[0], at * step) for at in (rank, rank + 1))
            local = torch.Size((high - low, *size[1:]))
            memory = torch.zeros(1, dtype=dtype).expand(local)
            shard = LocalShard(torch.Size((low, *[0] * (len(size) - 1))), local, memory.detach)
            made[name] = LocalTensor(size, TensorProperties(dtype), False, (shard,) if high > low else (), shared=False)
        return made

    def _held(self, rank: int) -> tuple[int, ...]:
        return tuple(min(max(0, rows - rank * step), step) for rows, step in self._rows)

    def plan(self, rank: int) -> SavePlan | None:
        """Return a rank's local plan if a rank with equal sizes has made one."""
        found = self._plans.get(self._held(rank))
        return None if found is None else found.of_rank(rank)

    def learn(self, rank: int, plan: SavePlan) -> None:
        """Keep a local plan for ranks with equal sizes."""
        columns = columns_of(plan.items)
        steps = {name: step for name, _, _, step in self.tensors}
        cut = np.array([steps[name] for name in columns.table.tensor_names], np.int64)
        positions = columns.table.box_starts()[:-1][cut > 0]
        self._plans[self._held(rank)] = _Plan(plan, columns, positions, cut[cut > 0])

    def stored(
        self, columns: PlanColumns, planner: _Planner, backend: StoreBackend, placement: SavePlacement
    ) -> StoredItems:
        """Return where a rank's items are in its files, with checksums drawn by the rank's number."""
        table = columns.table
        parts = table.tensor_dtype, table.tensor_ndim, table.chunk_sizes, columns.whole, columns.object_bytes
        key = tuple(np.ascontiguousarray(part).tobytes() for part in parts)
        if key not in self._layouts:
            planner.hold_values()
            measured = measure_items(
                list(column_requests(columns, planner)),
                prefix=placement.prefix,
                save_id=placement.save_id,
                layout=backend.layout,
                threads=backend.threads,
                single_file=backend.single_file,
            )
            self._layouts[key] = measured, placement.prefix
        found, prefix = self._layouts[key]
        draw, columns_here = np.random.default_rng(planner.rank), found.columns
        crcs = draw.integers(0, 1 << 32, len(columns_here.crc32), np.uint32)
        running = draw.integers(0, 1 << 32, len(columns_here.running_crcs), np.uint32)
        files = [placement.prefix + name.removeprefix(prefix) for name in found.files]
        return StoredItems(replace(columns_here, crc32=crcs, running_crcs=running), files, found.chains)


class _Planner(DefaultSavePlanner):
    def __init__(self, job: Job, rank: int) -> None:
        super().__init__()
        self._job, self.rank = job, rank
        self._known: SavePlan | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._known = self._job.plan(self.rank)
        state_dict = self._job.state(self.rank) if self._known is None else {}
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def hold_values(self) -> None:
        if not self.state_dict:
            super().set_up_planner(self._job.state(self.rank), self.storage_meta, self.is_coordinator)

    def create_local_plan(self) -> SavePlan:
        if self._known is None:
            made = super().create_local_plan()
            self._job.learn(self.rank, made)
            return made
        self.plan, self._splittable = self._known, self._known.splittable
        return self._known


class _Writer(VirtualWriter):
    """Counts the bytes of data files, which are not kept."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job.world, job.checkpoint_id)
        self._job, self._of_rank = job, rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        clock, started = self._job.world.clock, self._job.world.clock.now
        super().write_data(replace(plan, items=[]), planner)  # joins the save
        if not isinstance(planner, _Planner):
            raise TypeError("a rehearsal has a planner of its own")
        columns = columns_of(plan.items)
        stored = self._job.stored(columns, planner, self._backend, plan.storage_data)
        ends = np.zeros(len(stored.files), np.uint64)
        np.maximum.at(ends, stored.columns.file, stored.columns.offset + stored.columns.length)
        store = self._job.world.store(self.checkpoint_id)
        sinks = [store.create(name) for name in stored.files]
        pieces = min(_MOST_PIECES, -(-int(ends.max(initial=0)) // _PIECE_BYTES))
        for piece in range(pieces):
            mark = b"" if piece else data_mark(self.save_id)
            for sink, end in zip(sinks, ends.tolist(), strict=True):
                sink.skip(end * (piece + 1) // pieces - end * piece // pieces, mark)
        for sink in sinks:
            sink.close()
        self._job.world.disk.wait("sync", self._job.checkpoint_id)
        self._backend.wrote(stored.files)
        self._job.world.phases.append((self._of_rank, WRITING, started, clock.now))
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(LazyList(WrittenColumns(columns, stored)))
        return done
