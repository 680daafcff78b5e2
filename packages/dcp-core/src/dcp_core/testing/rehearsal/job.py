"""`Job`: a save of tensors without bytes by all ranks of a `World`, each tensor cut by rows over all of them.

The first rank with shards of certain sizes runs the whole code. Ranks with equal sizes take over its local plan, with
offsets of their own, and the layout of its files. Messages, the global plan, files and the index are made by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dcp_core.estimation import lay_out
from dcp_core.planning.plan_forms import Brief, Form
from dcp_core.planning.save_planner import DefaultSavePlanner
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import StorageMeta, TensorProperties, dtype_of
from dcp_core.records.protocols import SavePlan, SavePlanner, WriteResult
from dcp_core.saving import save
from dcp_core.shards.shards import LocalShard, LocalTensor
from dcp_core.tables.plan_columns import PlanColumns, WrittenColumns, columns_of
from dcp_core.testing.rehearsal.clock import Task
from dcp_core.testing.rehearsal.world import VirtualWriter, World
from dcp_io import StoreBackend
from dcp_io.saves.save_files import data_mark
from dcp_manifest.index.columns import CheckpointIndex
from dcp_manifest.index.stored_items import StoredItems

__all__ = ["WRITING", "Job", "Tensor"]

Tensor = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype."""
WRITING = "own files"
"""Name in `World.phases` of the time in which a rank writes its data files."""
# Ranks write at the same time, but the disk serves one request after the other.
_PIECE_BYTES, _MOST_PIECES = 16 << 20, 16


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
        self.forms: dict[tuple[int, ...], Form] = {}
        """What ranks hold → their local plan, apart from offsets."""
        self.ends: dict[int, float] = {}
        """Rank → when its call has returned or raised, also that of a killed one."""
        self._layouts: dict[tuple[bytes, ...], tuple[CheckpointIndex, str, StoredItems, list[int]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(size.numel() * dtype.itemsize for _, size, dtype, _ in self.tensors)

    @property
    def whole_ranks(self) -> int:
        """Ranks that have run the whole code."""
        return len(self.forms)

    def run(self, starts: Sequence[float] = ()) -> list[Task]:
        """Save once on all ranks."""
        return self.world.run(self._save, starts=starts)

    def _save(self, rank: int) -> None:
        try:
            planner = _Planner(self, rank)
            save({}, storage_writer=_Writer(self, planner), planner=planner)
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

    def held(self, rank: int) -> tuple[int, ...]:
        """Return a rank's number of rows of each kind of tensor."""
        return tuple(min(max(0, rows - rank * step), step) for rows, step in self._rows)

    def plan(self, rank: int) -> SavePlan | None:
        """Return a rank's local plan if a rank with equal sizes has made one."""
        form = self.forms.get(self.held(rank))
        if form is None:
            return None
        made = form.plan(Brief(b"", np.full(form.ways, rank, np.uint32), known=False))
        columns = columns_of(made.items)
        return replace(made, items=PlanColumns(columns.table, columns.whole, columns.object_bytes).items())

    def layout(self, plan: SavePlan, planner: _Planner, backend: StoreBackend) -> tuple[StoredItems, list[int]]:
        """Do as `lay_out`. From here on, ranks with equal files share the rest of their plans."""
        columns, prefix = columns_of(plan.items), plan.storage_data.prefix
        table = columns.table
        parts = table.tensor_dtype, table.tensor_ndim, table.chunk_sizes, columns.whole, columns.object_bytes
        key = tuple(np.ascontiguousarray(part).tobytes() for part in parts)
        if key not in self._layouts:
            planner.hold_values()
            self._layouts[key] = table, prefix, *lay_out(plan, planner, backend)
        shared, prefix_there, found, sizes = self._layouts[key]
        for one in (columns, columns_of(planner.known.items)) if planner.known else ():
            one.table, one.chosen = shared, None  # offsets are in the global plan
        files = [prefix + name.removeprefix(prefix_there) for name in found.files]
        return StoredItems(found.columns, files), sizes


class _Planner(DefaultSavePlanner):
    def __init__(self, job: Job, rank: int) -> None:
        super().__init__()
        self._job, self.rank = job, rank
        self.known: SavePlan | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.known = self._job.plan(self.rank)
        state_dict = self._job.state(self.rank) if self.known is None else {}
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def hold_values(self) -> None:
        if not self.state_dict:
            super().set_up_planner(self._job.state(self.rank), self.storage_meta, self.is_coordinator)

    def create_local_plan(self) -> SavePlan:
        if self.known is None:
            made = super().create_local_plan()
            self._job.forms[self._job.held(self.rank)] = Form(made)
            return made
        self.plan, self._splittable = self.known, self.known.splittable
        return self.known


class _Writer(VirtualWriter):
    """Counts the bytes of data files, which are not kept."""

    def __init__(self, job: Job, planner: _Planner) -> None:
        super().__init__(job.world, job.checkpoint_id)
        self._job, self._planner = job, planner

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        world, rank, started = self._job.world, self._planner.rank, self._job.world.clock.now
        stored, sizes = self._job.layout(plan, self._planner, self._backend)
        super().write_data(replace(plan, items=[]), planner)  # joins the save
        pieces = min(_MOST_PIECES, -(-max(sizes, default=0) // _PIECE_BYTES))
        store, files = world.store(self.checkpoint_id), dict(zip(stored.files, sizes, strict=True))
        world.clock.play(store.write_sizes(world.disk.host_of(rank), files, pieces, data_mark(self.save_id)))
        world.disk.wait("sync", self._job.checkpoint_id)
        self._backend.wrote(stored.files)
        world.phases.append((rank, WRITING, started, world.clock.now))
        draw, items = np.random.default_rng(rank), stored.columns
        crcs, running = (draw.integers(0, 1 << 32, len(part), np.uint32) for part in (items.crc32, items.running_crcs))
        written = StoredItems(replace(items, crc32=crcs, running_crcs=running), stored.files)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(LazyList(WrittenColumns(columns_of(plan.items), written)))
        return done
