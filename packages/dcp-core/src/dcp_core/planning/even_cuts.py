"""`plan_columns` for many ranks: planned for each way in which tensors are cut, not for each chunk.

Tensors are *cut alike* if, per dimension, the shapes and all ranks' offsets and sizes are in one ratio. One tensor of
each such class is merged; the boxes of the others are its boxes, scaled. `choose` plans tensors with replicas.

Decision: docs/decisions/0031-equal-plans-are-sent-once.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.planning.global_plan import (
    MergedPlans,
    choose,
    chunk_sizes,
    chunks_without,
    merge_plans,
    merge_tensors,
    plan_columns,
    with_aliases,
)
from dcp_core.planning.plan_forms import FormColumns
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import Metadata, dtype_of
from dcp_core.records.protocols import SavePlan, WriteItem
from dcp_core.tables.metadata_columns import metadata_from_index
from dcp_core.tables.plan_columns import PlanColumns, Selection, columns_of, take_chunks
from dcp_manifest.index.boxes import is_proper
from dcp_manifest.index.columns import CheckpointIndex, ranges, starts
from dcp_manifest.types import I64

# With fewer ranks per form, classes save no time.
_RANKS_PER_FORM = 16


def plan_all(
    all_plans: Sequence[SavePlan],
    aliases: Mapping[str, str],
    *,
    complete: bool,
    to_lowest_rank: bool,
    pinned_to_lowest: Collection[str],
) -> tuple[list[SavePlan], Metadata] | None:
    """See `plan_columns`."""
    columns = [columns_of(plan.items) for plan in all_plans]
    forms: dict[int, dict[int, PlanColumns]] = {}
    for rank, one in enumerate(columns):
        forms.setdefault(id(one.form if isinstance(one, FormColumns) else one), {})[rank] = one
    cuts = others = None
    if len(forms) * _RANKS_PER_FORM <= len(columns):
        cuts = _EvenCuts.of([_Group(ranks, aliases) for ranks in forms.values()])
    if cuts is not None and is_proper(cuts.merged.index, complete=complete):
        others = choose(
            _taken(cuts.groups, ~cuts.even),
            complete=complete,
            splittable=np.array([plan.splittable for plan in all_plans], bool),
            lowest=None if to_lowest_rank else frozenset(pinned_to_lowest),
            loads=cuts.loads(),
        )
    if cuts is None or others is None or not set(cuts.index.tensor_names).isdisjoint(others[0].object_names):
        return plan_columns(
            all_plans, aliases, complete=complete, to_lowest_rank=to_lowest_rank, pinned_to_lowest=pinned_to_lowest
        )
    index = with_aliases(cuts.whole_index(others[0]), aliases)
    items = dict(chain.from_iterable(cuts.items(group, index, others[1]) for group in cuts.groups))
    return [replace(plan, items=items[rank]) for rank, plan in enumerate(all_plans)], metadata_from_index(index)


class _Group:
    def __init__(self, columns: dict[int, PlanColumns], aliases: Mapping[str, str]) -> None:
        self.columns = columns
        one, *_ = columns.values()
        form = one.form if isinstance(one, FormColumns) else None
        # An offset is the shared one plus the size times the rank's cell of the offset's way of cutting.
        self.shared = one if form is None else form.columns
        self.ways = np.zeros(len(self.shared.table.chunk_offsets), np.int64)
        self.cells = np.zeros((1, 1), np.uint8)
        if form is not None:
            cells, ways = form.cells([each for each in columns.values() if isinstance(each, FormColumns)])
            self.ways[form.cut.even] = ways + 1
            self.cells = np.pad(cells, ((0, 0), (1, 0)))  # 0 for offsets that are equal on all ranks
        self.kept = chunks_without(self.shared, aliases)
        if self.kept is not None:
            self.ways = self.ways[_numbers(self.shared.table, self.kept)]
            every_object = np.arange(len(self.shared.table.object_names))
            self.shared = self.shared.select(Selection(self.kept, every_object, self.kept))
        self.tensors = np.zeros(0, np.int64)  # per chunk, once the job's tensors are known

    def taken(self, chunks: I64) -> Iterator[tuple[int, PlanColumns]]:
        table, tensors = take_chunks(self.shared.table, chunks, np.arange(len(self.shared.table.object_names)))
        ways, whole = self.ways[_numbers(self.shared.table, chunks)], self.shared.whole[tensors]
        for rank, cells in zip(self.columns, self.cells, strict=True):
            offsets = table.chunk_offsets + table.chunk_sizes * cells[ways].astype(np.int64)
            yield rank, PlanColumns(replace(table, chunk_offsets=offsets), whole, self.shared.object_bytes)


def _numbers(table: CheckpointIndex, chunks: I64) -> I64:
    return _joined(starts(np.repeat(table.tensor_ndim, table.tensor_chunks)), chunks)


def _joined(begins: I64, rows: I64) -> I64:
    return ranges(begins[:-1][rows], begins[1:][rows])


@dataclass(slots=True)
class _EvenCuts:
    groups: Sequence[_Group]
    index: CheckpointIndex  # without chunks
    unit: I64  # scale of the tensor, per number of `index.tensor_shape`
    kinds: I64  # class of each tensor: the row of its first tensor in `merged`
    first: I64  # first tensor of each class
    merged: MergedPlans
    even: npt.NDArray[np.bool_]  # whether no part of the tensor is on two ranks

    @classmethod
    def of(cls, groups: Sequence[_Group]) -> _EvenCuts | None:
        names = dict.fromkeys(chain.from_iterable(group.shared.table.tensor_names for group in groups))
        tensors = {name: row for row, name in enumerate(names)}
        rows = [np.array([tensors[name] for name in group.shared.table.tensor_names], np.int64) for group in groups]
        index = merge_tensors([group.shared for group in groups], tensors, rows)
        if index is None or not all(group.shared.table.tensor_chunks.all() for group in groups):
            return None
        begins, unit, places = index.shape_starts(), index.tensor_shape.copy(), []
        for group, own in zip(groups, rows, strict=True):
            group.tensors = np.repeat(own, group.shared.table.tensor_chunks)
            places.append(_joined(begins, group.tensors))
            np.gcd.at(unit, places[-1], group.shared.table.chunk_sizes)
            np.gcd.at(unit, places[-1], group.shared.table.chunk_offsets)
        np.maximum(unit, 1, out=unit)
        shapes = index.tensor_shape // unit
        keys: list[list[Any]] = [[shapes[begin:end].tobytes()] for begin, end in pairwise(begins.tolist())]
        for number, (group, own, place) in enumerate(zip(groups, rows, places, strict=True)):
            table = group.shared.table
            facts = np.stack([table.chunk_sizes // unit[place], table.chunk_offsets // unit[place], group.ways], axis=1)
            boxes = pairwise(table.box_starts().tolist())
            for row, count, (begin, end) in zip(own.tolist(), table.tensor_chunks.tolist(), boxes, strict=True):
                keys[row] += (number, count, facts[begin:end].tobytes())
        known: dict[Any, int] = {}
        kinds = np.array([known.setdefault(tuple(key), len(known)) for key in keys], np.int64)
        first = np.unique(kinds, return_index=True)[1]
        merged = merge_plans(_taken(groups, np.isin(np.arange(len(kinds)), first)))
        if merged is None:
            return None
        chunks = merged.index.tensor_chunks
        held = np.bincount(np.repeat(np.arange(len(chunks)), chunks)[merged.box], minlength=len(chunks))
        return cls(groups, index, unit, kinds, first, merged, (held == chunks)[kinds])

    def loads(self) -> I64:
        item_bytes = np.array([dtype_of(name).itemsize for name in self.index.dtypes] or [1], np.int64)
        loads = np.zeros(len(self.merged.first_row) - 1, np.int64)
        for group in self.groups:
            nbytes = chunk_sizes(group.shared.table)[0] * item_bytes[self.index.tensor_dtype[group.tensors]]
            loads[[*group.columns]] = np.maximum(nbytes, 1)[self.even[group.tensors]].sum()
        return loads

    def whole_index(self, others: CheckpointIndex) -> CheckpointIndex:
        merged, dims = self.merged.index, self.index.tensor_ndim.tolist()
        place = _joined(self.index.shape_starts(), np.repeat(self.first, merged.tensor_chunks))
        counts, begins, unit = merged.tensor_chunks[self.kinds], merged.box_starts()[self.kinds], self.unit.copy()
        counts[~self.even] = others.tensor_chunks
        begins[~self.even] = len(place) + others.box_starts()[:-1]
        unit[_joined(self.index.shape_starts(), np.flatnonzero(~self.even))] = 1
        index = replace(self.index, tensor_chunks=counts)
        index.object_names, index.object_owner = others.object_names, others.object_owner
        shapes, into = index.shape_starts().tolist(), index.box_starts().tolist()
        # Most of the memory of a plan of many ranks.
        kind = np.int32 if int(index.tensor_shape.max(initial=0)) < 1 << 31 else np.int64
        for name in ("chunk_offsets", "chunk_sizes"):
            scaled = np.concatenate([getattr(merged, name) // self.unit[place], getattr(others, name)])
            numbers = np.empty(into[-1], kind)
            for row, begin in enumerate(begins.tolist()):
                if dims[row]:
                    part = numbers[into[row] : into[row + 1]]
                    boxes = scaled[begin : begin + len(part)].reshape(-1, dims[row])
                    part.reshape(boxes.shape)[:] = boxes * unit[shapes[row] : shapes[row + 1]]
            setattr(index, name, numbers)
        if index.chunk_sizes.max(initial=0) < 1 << 15:
            index.chunk_sizes = index.chunk_sizes.astype(np.int16)
        return index

    def items(
        self, group: _Group, index: CheckpointIndex, others: Sequence[Selection]
    ) -> Iterator[tuple[int, LazyList[WriteItem]]]:
        table, kinds, is_even = group.shared.table, self.kinds[group.tensors], self.even[group.tensors]
        # Where each chunk's counterpart is among those that the rank has in `merged`.
        taken = np.flatnonzero(np.isin(group.tensors, self.first))
        begins = np.zeros(len(self.first), np.int64)
        begins[kinds[taken][::-1]] = np.arange(len(taken))[::-1]
        local = np.repeat(np.arange(len(table.tensor_chunks)), table.tensor_chunks)
        same = begins[kinds] + np.arange(len(local)) - table.chunk_starts()[local]
        even, other, before = np.flatnonzero(is_even), np.flatnonzero(~is_even), self.merged.index.chunk_starts()[kinds]
        object_rows = {name: row for row, name in enumerate(index.object_names)}
        objects = np.array([object_rows[name] for name in table.object_names], np.int64)
        chunk_starts, hints = index.chunk_starts()[group.tensors], np.zeros(len(local), np.int64)
        small = np.min_scalar_type(int(index.tensor_chunks.sum()) + len(next(iter(group.columns.values()))))
        whole = np.arange(len(local)) if group.kept is None else group.kept  # rows in the plan of the rank
        few = np.min_scalar_type(max(int(index.tensor_chunks.max(initial=0)), int(whole.max(initial=0))))
        for rank, columns in group.columns.items():
            chosen = others[rank]
            hints[even] = (self.merged.box[self.merged.first_row[rank] :][same] - before)[even]
            hints[other[chosen.chunks]] = chosen.hints
            rows = np.sort(np.concatenate([even, other[chosen.chunks]]))
            positions = np.searchsorted(rows, other[chosen.chunks]).tolist()
            parts = tuple([(positions[at], dim, begin, end) for at, dim, begin, end in chosen.parts])
            chosen = Selection(whole[rows].astype(few), chosen.objects, hints[rows].astype(few), parts)
            if isinstance(columns, FormColumns):
                chunks = (chunk_starts[rows] + hints[rows]).astype(small)
                yield rank, LazyList(columns.rows_in(index, chunks, objects[chosen.objects], chosen))
            else:
                yield rank, columns.select(chosen).items()


def _taken(groups: Sequence[_Group], tensors: npt.NDArray[np.bool_]) -> list[PlanColumns]:
    found = dict(chain.from_iterable(group.taken(np.flatnonzero(tensors[group.tensors])) for group in groups))
    return [found[rank] for rank in range(len(found))]
