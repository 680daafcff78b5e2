"""What plans of many ranks have in common: a *form*, which one rank sends for all, and each rank's *cells*.

If ranks cut a tensor evenly, an offset is its chunk's size times a cell number. In a form, such offsets are 0. A rank
sends its cells once for each way in which tensors are cut.

Decision: docs/decisions/0031-equal-plans-are-sent-once.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dcp_core.planning.replicas import fingerprint
from dcp_core.records.protocols import SavePlan
from dcp_core.tables.plan_columns import PlanColumns, PlannedRows, Selection, columns_of
from dcp_manifest.index.columns import CheckpointIndex, starts
from dcp_manifest.types import I64

# From so many ranks on, two phases pay.
MANY_RANKS = 128


@dataclass(frozen=True, slots=True)
class Brief:
    """A plan without its form."""

    # Equal for ranks whose plans differ in cells only.
    form: bytes
    # One per way of cutting, or one per even offset.
    cells: npt.NDArray[np.unsignedinteger]
    # Whether the rank would recognise the plan.
    known: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """Which offsets are even, and the ways of cutting."""

    # Whether each offset is a multiple of its size, in a dimension that is cut.
    even: npt.NDArray[np.bool_]
    # Way of cutting per even offset, counted from 0.
    ways: I64

    @classmethod
    def of(cls, table: CheckpointIndex) -> Cut:
        """Find them."""
        ndim = np.repeat(table.tensor_ndim.astype(np.int64), table.tensor_chunks)
        dim = np.arange(int(ndim.sum())) - np.repeat(starts(ndim)[:-1], ndim)
        first = np.repeat(table.shape_starts()[:-1], table.tensor_chunks * table.tensor_ndim)
        shapes, sizes = table.tensor_shape[first + dim], table.chunk_sizes
        even = (sizes > 0) & (sizes < shapes) & (table.chunk_offsets >= 0)
        even[even] = table.chunk_offsets[even] % sizes[even] == 0
        # Tensors that have equally many cells in a dimension are mostly cut by the same ranks.
        ways = np.unique(shapes[even] // sizes[even] * 64 + dim[even], return_inverse=True)[1].astype(np.int64)
        return cls(even, ways)


def brief_of(plan: SavePlan, *, known: bool) -> Brief | None:
    """Return a local plan without its form; None if the plan cannot be compared with others'."""
    if type(plan) is not SavePlan:
        return None
    columns = columns_of(plan.items)
    table, cut = columns.table, Cut.of(columns.table)
    cells = table.chunk_offsets[cut.even] // table.chunk_sizes[cut.even]
    extra = (tuple((plan.digests or {}).values()), tuple(columns.object_bytes.tolist()))
    form = fingerprint(
        replace(plan, items=_with_offsets(columns, np.where(cut.even, 0, table.chunk_offsets)).items()), extra
    )
    if form is None or columns.hints is not None:
        return None
    of_way = np.zeros(int(cut.ways.max(initial=-1)) + 1, np.int64)
    of_way[cut.ways] = cells
    if np.array_equal(of_way[cut.ways], cells):
        cells = of_way
    return Brief(form, cells.astype(np.min_scalar_type(int(cells.max(initial=0)))), known)


class Form:
    """The form of a plan, from the plan of any rank that has it."""

    def __init__(self, plan: SavePlan) -> None:
        self._plan = plan
        columns = columns_of(plan.items)
        self.cut = Cut.of(columns.table)
        self.columns = _with_offsets(columns, np.where(self.cut.even, 0, columns.table.chunk_offsets))
        self.ways = int(self.cut.ways.max(initial=-1)) + 1

    def plan(self, brief: Brief) -> SavePlan:
        """Return a rank's local plan. Plans of one form share all but offsets."""
        return replace(self._plan, items=FormColumns(self, brief.cells).items())

    def cells(self, ranks: Sequence[FormColumns]) -> tuple[npt.NDArray[np.unsignedinteger], I64]:
        """Return (ranks, ways of cutting), and the way per even offset."""
        if all(len(one.cells) == self.ways for one in ranks):
            return np.stack([one.cells for one in ranks]), self.cut.ways
        # On some ranks, tensors that have equally many cells are cut differently.
        cells, ways = np.unique(np.stack([one.even_cells() for one in ranks]), axis=1, return_inverse=True)
        return cells, ways.reshape(-1)


class FormColumns(PlanColumns):
    """One rank's items; `table` is computed on access."""

    def __init__(self, form: Form, cells: npt.NDArray[np.unsignedinteger]) -> None:
        self.form, self.cells = form, cells
        self.whole, self.object_bytes = form.columns.whole, form.columns.object_bytes
        self.hints = self.chosen = self.chosen_from = self.order = None

    def __len__(self) -> int:
        return len(self.form.columns)

    def names(self) -> set[str]:
        """See `PlanColumns`."""
        return self.form.columns.names()

    def even_cells(self) -> npt.NDArray[np.unsignedinteger]:
        """Return the cell per even offset."""
        return self.cells[self.form.cut.ways] if len(self.cells) == self.form.ways else self.cells

    @cached_property
    def table(self) -> CheckpointIndex:  # type: ignore[override]
        """See `PlanColumns`."""
        table, even = self.form.columns.table, self.form.cut.even
        offsets = table.chunk_offsets.copy()
        offsets[even] = table.chunk_sizes[even] * self.even_cells().astype(np.int64)
        return replace(table, chunk_offsets=offsets)

    def rows_in(self, index: CheckpointIndex, chunks: I64, objects: I64, chosen: Selection) -> PlannedRows:
        """Return chosen items as rows of an index."""
        table = self.form.columns.table
        own = np.repeat(np.arange(len(table.tensor_chunks)), table.tensor_chunks)[chosen.chunks]
        new = np.append(True, own[1:] != own[:-1])[: len(own)]
        whole = self.whole[own[new]]
        whole[(np.cumsum(new) - 1)[[at for at, *_ in chosen.parts]]] = 0
        return PlannedRows(index, chunks, objects, whole, self.object_bytes[chosen.objects], chosen, lambda: self)


def _with_offsets(columns: PlanColumns, offsets: I64) -> PlanColumns:
    return PlanColumns(replace(columns.table, chunk_offsets=offsets), columns.whole, columns.object_bytes)
