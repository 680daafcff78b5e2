"""What plans of many ranks have in common: a *form*, which one rank sends for all, and each rank's *cells*.

A tensor that ranks cut evenly has chunks of one size: a chunk's offset is that size times the number of its cell. In a
plan's form these offsets are 0, so that ranks that differ in nothing else have equal forms. Cells are the same for most
tensors of a rank; they are sent once for each way in which tensors are cut.

Decision: docs/decisions/0031-equal-plans-are-sent-once.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dcp_core.planning.replicas import fingerprint
from dcp_core.records.protocols import SavePlan
from dcp_core.tables.plan_columns import PlanColumns, columns_of
from dcp_manifest.index.columns import CheckpointIndex, starts
from dcp_manifest.types import I64

__all__ = ["Brief", "Form", "brief_of"]


@dataclass(frozen=True, slots=True)
class Brief:
    """A plan without its form."""

    form: bytes
    """Equal for ranks whose plans differ in cells only."""
    cells: npt.NDArray[np.unsignedinteger]
    """One per way of cutting, or one per even offset."""
    known: bool
    """Whether the rank would recognise the plan."""


@dataclass(frozen=True, slots=True)
class _Cut:
    even: npt.NDArray[np.bool_]
    """Whether each offset is a multiple of its size, in a dimension that is cut."""
    ways: I64
    """Way of cutting per even offset, counted from 0."""

    @classmethod
    def of(cls, table: CheckpointIndex) -> _Cut:
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
    table, cut = columns.table, _Cut.of(columns.table)
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
        self._columns = columns_of(plan.items)
        self._cut = _Cut.of(self._columns.table)
        self._sizes = self._columns.table.chunk_sizes[self._cut.even]
        self._count = int(self._cut.ways.max(initial=-1)) + 1

    def plan(self, brief: Brief) -> SavePlan:
        """Return a rank's local plan. Plans of one form share all but offsets."""
        cells = brief.cells.astype(np.int64)
        offsets = self._columns.table.chunk_offsets.copy()
        offsets[self._cut.even] = self._sizes * (cells[self._cut.ways] if len(cells) == self._count else cells)
        return replace(self._plan, items=_with_offsets(self._columns, offsets).items())


def _with_offsets(columns: PlanColumns, offsets: I64) -> PlanColumns:
    return PlanColumns(replace(columns.table, chunk_offsets=offsets), columns.whole, columns.object_bytes)
