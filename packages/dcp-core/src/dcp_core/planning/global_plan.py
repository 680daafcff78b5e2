"""Global plan of a save: merge the ranks' plans, check coverage, assign each item to one rank."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.records.metadata import Metadata, dtype_of
from dcp_core.records.protocols import SavePlan
from dcp_core.tables.metadata_columns import metadata_from_index
from dcp_core.tables.plan_columns import PlanColumns, Selection, columns_of
from dcp_manifest.index.boxes import by_dims, is_proper
from dcp_manifest.index.columns import CheckpointIndex, distinct, ranges, starts
from dcp_manifest.types import I64


def plan_columns(
    all_plans: Sequence[SavePlan],
    aliases: Mapping[str, str],
    *,
    complete: bool | None,
    to_lowest_rank: bool,
    pinned_to_lowest: Collection[str],
) -> tuple[list[SavePlan], Metadata] | None:
    """Return the final plans and the metadata; None if ranks contradict each other or chunks leave holes.

    `aliases`: unwritten FQN → FQN that stores its data. `complete`: whether chunks must fill tensors; None skips the
    check. The lowest holder writes `pinned_to_lowest`, and everything with `to_lowest_rank`.
    """
    whole_plans = [columns_of(plan.items) for plan in all_plans]
    kept_rows = [chunks_without(one, aliases) for one in whole_plans]
    known = [
        one if kept is None else one.select(Selection(kept, np.arange(len(one.table.object_names)), kept))
        for one, kept in zip(whole_plans, kept_rows, strict=True)
    ]
    found = choose(
        known,
        complete=complete,
        splittable=np.array([plan.splittable for plan in all_plans], bool),
        lowest=None if to_lowest_rank else frozenset(pinned_to_lowest),
    )
    if found is None:
        return None
    index, selections = found
    plans = []
    for plan, one, kept, chosen in zip(all_plans, whole_plans, kept_rows, selections, strict=True):
        own = chosen if kept is None else replace(chosen, chunks=kept[chosen.chunks])
        plans.append(replace(plan, items=one.select(own).items()))
    return plans, metadata_from_index(with_aliases(index, aliases))


def with_aliases(index: CheckpointIndex, aliases: Mapping[str, str]) -> CheckpointIndex:
    """Add aliases (alias → tensor)."""
    rows = {name: row for row, name in enumerate(index.tensor_names)} if aliases else {}
    targets = np.array([rows[target] for target in aliases.values()], np.uint32)
    return replace(index, alias_names=list(aliases), alias_targets=targets)


def choose(
    known: Sequence[PlanColumns],
    *,
    complete: bool | None,
    splittable: npt.NDArray[np.bool_],
    lowest: frozenset[str] | None,
    loads: I64 | None = None,
) -> tuple[CheckpointIndex, list[Selection]] | None:
    """Return the index, and what each rank writes of `known`; None as in `plan_columns`.

    `lowest`: names for the lowest holder; None for all. `loads`: further bytes per rank.
    """
    merged = merge_plans(known)
    if merged is None or (complete is not None and not is_proper(merged.index, complete=complete)):
        return None
    assigned = assign(_candidates(known, merged, splittable=splittable, lowest=lowest), len(known), loads)
    cuts = Cuts(merged.index, assigned.parts)
    own_parts: dict[int, dict[int, tuple[int, Part]]] = {}
    for row, parts in assigned.parts.items():
        for number, part in enumerate(parts):
            own_parts.setdefault(part.rank, {})[row] = number, part
    return cuts.index, [_chosen(rank, merged, cuts, assigned, own_parts.get(rank, {})) for rank in range(len(known))]


def _candidates(
    known: Sequence[PlanColumns],
    merged: MergedPlans,
    *,
    splittable: npt.NDArray[np.bool_],
    lowest: frozenset[str] | None,
) -> Candidates:
    index = merged.index
    item_bytes = np.array([dtype_of(name).itemsize for name in index.dtypes] or [1], np.int64)
    volumes, slices = chunk_sizes(index)
    tensor = np.repeat(np.arange(len(index.tensor_names)), index.tensor_chunks)
    # Unique pairs of candidate and holding rank, in ascending order.
    chunks, world = len(volumes), len(known)
    object_bytes = np.ones(len(index.object_names), np.int64)
    held = [merged.box * world + np.repeat(np.arange(world), np.diff(merged.first_row))]
    for rank, (one, rows) in enumerate(zip(known, merged.object_rows, strict=True)):
        np.maximum.at(object_bytes, rows, one.object_bytes)
        held.append((chunks + rows) * world + rank)
    pairs = distinct(np.concatenate(held))
    thing, ranks = np.divmod(pairs, world)
    first = starts(np.bincount(thing, minlength=chunks + len(object_bytes)))
    settled = np.full(chunks + len(object_bytes), lowest is None)
    if lowest:
        pinned = [row for row, name in enumerate(index.tensor_names) if name in lowest]
        settled[:chunks] = np.isin(tensor, pinned)
        settled[chunks:] = [name in lowest for name in index.object_names]
    if chunks:
        slices[~np.logical_and.reduceat(splittable[ranks[: first[chunks]]], first[:chunks])] = 1
    return Candidates(
        nbytes=np.concatenate([np.maximum(volumes * item_bytes[index.tensor_dtype[tensor]], 1), object_bytes]),
        slices=np.concatenate([slices, np.ones(len(object_bytes), np.int64)]),
        first=first,
        ranks=ranks,
        settled=settled,
    )


def chunks_without(columns: PlanColumns, names: Mapping[str, str]) -> I64 | None:
    """Return other tensors' chunks; None for all."""
    known = columns.table.tensor_names
    if not names or names.keys().isdisjoint(known):
        return None
    return np.flatnonzero(np.repeat([name not in names for name in known], columns.table.tensor_chunks))


def _chosen(
    rank: int,
    merged: MergedPlans,
    cuts: Cuts,
    assigned: Assignment,
    own: Mapping[int, tuple[int, Part]],
) -> Selection:
    boxes = merged.box[merged.first_row[rank] : merged.first_row[rank + 1]]
    once = np.zeros(len(boxes), bool)
    once[np.unique(boxes, return_index=True)[1]] = True
    # Visit only the rank's own boxes: visiting all boxes per rank would be quadratic in the number of ranks.
    mine = assigned.writer[boxes] == rank
    if own:
        mine |= np.isin(boxes, list(own))
    rows = np.flatnonzero(once & mine)
    merged_rows = cuts.first[boxes[rows]]
    parts = []
    for position, box in enumerate(boxes[rows].tolist() if own else ()):
        if box in own:
            number, part = own[box]
            parts.append((position, int(cuts.dim[box]), part.begin, part.end))
            merged_rows[position] += number
    object_rows = merged.object_rows[rank] + len(cuts.first) - 1
    return Selection(rows, np.flatnonzero(assigned.writer[object_rows] == rank), cuts.hint[merged_rows], tuple(parts))


@dataclass(frozen=True, slots=True)
class MergedPlans:
    """All ranks' values, each box and object once, and where they are in the ranks' plans."""

    index: CheckpointIndex
    object_rows: list[I64]
    """Per rank: the rows of its objects."""
    box: I64
    """Chunk's row, per chunk that a rank holds, in rank order."""
    first_row: I64
    """Where each rank's chunks start in `box`, then their number."""


def merge_plans(columns: Sequence[PlanColumns]) -> MergedPlans | None:
    """Merge all ranks' plans; None if they contradict each other."""
    tensors: dict[str, int] = {}
    objects: dict[str, int] = {}
    tensor_rows: list[I64] = []
    object_rows: list[I64] = []
    shared: dict[int, I64] = {}  # plans of one form share their lists of names
    for one in columns:
        for names, known, rows in (
            (one.table.tensor_names, tensors, tensor_rows),
            (one.table.object_names, objects, object_rows),
        ):
            if id(names) not in shared:
                shared[id(names)] = np.array([known.setdefault(name, len(known)) for name in names], np.int64)
            rows.append(shared[id(names)])
    index = None if not tensors.keys().isdisjoint(objects) else merge_tensors(columns, tensors, tensor_rows)
    if index is None:
        return None
    index.object_names, index.object_owner = list(objects), np.zeros(len(objects), np.uint32)
    none = np.zeros(0, np.int64)
    counts = [one.table.tensor_chunks for one in columns]
    held = np.concatenate([none, *map(np.repeat, tensor_rows, counts)])
    index.chunk_offsets = np.concatenate([none, *[one.table.chunk_offsets for one in columns]])
    index.chunk_sizes = np.concatenate([none, *[one.table.chunk_sizes for one in columns]])
    first, same, consistent = _first_of_equal(held, index.tensor_ndim[held], index)
    if not consistent:
        return None
    order = first[np.argsort(held[first], kind="stable")]
    position = np.empty(len(held), np.int64)
    position[order] = np.arange(len(order))
    places = starts(index.tensor_ndim[held])
    numbers = ranges(places[:-1][order], places[1:][order])
    index.chunk_offsets, index.chunk_sizes = index.chunk_offsets[numbers], index.chunk_sizes[numbers]
    index.tensor_chunks = np.bincount(held[order], minlength=len(tensors)).astype(np.int64)
    first_row = starts(np.array([int(count.sum()) for count in counts]))
    return MergedPlans(index, object_rows, position[same], first_row)


def merge_tensors(
    columns: Sequence[PlanColumns], tensors: Mapping[str, int], tensor_rows: Sequence[I64]
) -> CheckpointIndex | None:
    """Merge all ranks' tensors without chunks; None if they differ."""
    dtypes: dict[str, int] = {}
    facts = {}
    for name in ("dtype", "flags", "ndim"):
        facts[name] = np.zeros(len(tensors), np.uint8)
    first_rank = np.full(len(tensors), -1, np.int64)
    # Plans of one form share these facts: one rank of each form is enough.
    forms: dict[tuple[int, ...], int] = {}
    for rank, one in enumerate(columns):
        table = one.table
        shared = (table.dtypes, table.tensor_names, table.tensor_dtype, table.tensor_flags, table.tensor_ndim)
        forms.setdefault((*map(id, shared), id(table.tensor_shape)), rank)
    for rank in forms.values():
        table, rows = columns[rank].table, tensor_rows[rank]
        dtype = np.array([dtypes.setdefault(name, len(dtypes)) for name in table.dtypes] or [0], np.uint8)
        own = {"dtype": dtype[table.tensor_dtype], "flags": table.tensor_flags, "ndim": table.tensor_ndim}
        new = first_rank[rows] < 0
        for name, values in own.items():
            facts[name][rows[new]] = values[new]
        if [name for name in ("dtype", "ndim") if not np.array_equal(facts[name][rows], own[name])]:
            return None
        first_rank[rows[new]] = rank
    shape_starts = starts(facts["ndim"])
    shape = np.zeros(int(shape_starts[-1]), np.int64)
    for rank in forms.values():
        one, rows = columns[rank], tensor_rows[rank]
        places = ranges(shape_starts[:-1][rows], shape_starts[1:][rows])
        own_new = np.repeat(first_rank[rows] == rank, one.table.tensor_ndim)
        shape[places[own_new]] = one.table.tensor_shape[own_new]
        if not np.array_equal(shape[places], one.table.tensor_shape):
            return None
    return CheckpointIndex(
        dtypes=tuple(dtypes),
        tensor_names=list(tensors),
        tensor_dtype=facts["dtype"],
        tensor_flags=facts["flags"],
        tensor_ndim=facts["ndim"],
        tensor_owner=np.zeros(len(tensors), np.uint32),
        tensor_shape=shape,
    )


def chunk_sizes(index: CheckpointIndex) -> tuple[I64, I64]:
    """Return elements and equal slices per chunk."""
    volumes = np.ones(int(index.tensor_chunks.sum()), np.int64)
    slices = volumes.copy()
    for chunks in by_dims(index):
        volumes[chunks.rows] = chunks.sizes.prod(axis=1)
        for dim in reversed(range(chunks.sizes.shape[1])):
            size = chunks.sizes[:, dim]
            slices[chunks.rows] = np.where(size > 1, size, slices[chunks.rows])
    return volumes, slices


class Cuts:
    """Index in which parts (row → parts, ascending) replace some chunks."""

    def __init__(self, merged: CheckpointIndex, parts: Mapping[int, Sequence[Part]]) -> None:
        counts = np.ones(int(merged.tensor_chunks.sum()), np.int64)
        for row, cut in parts.items():
            counts[row] = len(cut)
        self.first = starts(counts)
        """Row of each chunk's first part, then the number of rows."""
        tensor = np.repeat(np.arange(len(merged.tensor_chunks)), merged.tensor_chunks)
        self.dim = np.zeros(len(counts), np.int64)
        offsets, sizes = merged.chunk_offsets, merged.chunk_sizes
        if parts:
            old_places = starts(merged.tensor_ndim[tensor])
            again = np.repeat(np.arange(len(counts)), counts)
            numbers = ranges(old_places[:-1][again], old_places[1:][again])
            offsets, sizes = offsets[numbers], sizes[numbers]
            places = starts(merged.tensor_ndim[tensor[again]])
            for row, cut in parts.items():
                dim = cut_dim(merged.chunk_sizes[old_places[row] : old_places[row + 1]].tolist()) or 0
                self.dim[row] = dim
                for place, part in zip(places[self.first[row] : self.first[row + 1]].tolist(), cut, strict=True):
                    offsets[place + dim] += part.begin
                    sizes[place + dim] = part.end - part.begin
            tensor = tensor[again]
        self.index = replace(
            merged,
            chunk_offsets=offsets,
            chunk_sizes=sizes,
            tensor_chunks=np.bincount(tensor, minlength=len(merged.tensor_chunks)).astype(np.int64),
        )
        self.hint = np.arange(len(tensor)) - self.index.chunk_starts()[:-1][tensor]


def _first_of_equal(tensor: I64, ndim: npt.NDArray[np.uint8], index: CheckpointIndex) -> tuple[I64, I64, bool]:
    same = np.arange(len(tensor))
    consistent = True
    places = starts(ndim)[:-1]
    for dims in distinct(ndim).tolist():
        rows = np.flatnonzero(ndim == dims)
        numbers = places[rows][:, None] + np.arange(dims)
        offsets, sizes = index.chunk_offsets[numbers], index.chunk_sizes[numbers]
        keys = (*offsets.T[::-1], tensor[rows])
        order = np.lexsort(keys)  # stable: the lowest rank precedes its equals
        ordered_offsets, ordered_tensor, ordered_sizes = offsets[order], tensor[rows][order], sizes[order]
        new = np.ones(len(rows), bool)
        new[1:] = (ordered_tensor[1:] != ordered_tensor[:-1]) | (ordered_offsets[1:] != ordered_offsets[:-1]).any(
            axis=1
        )
        leader = np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
        consistent = consistent and bool((ordered_sizes == ordered_sizes[leader]).all())
        same[rows[order]] = rows[order[leader]]
    return np.flatnonzero(same == np.arange(len(tensor))), same, consistent


# Minimum size of a part: smaller parts cost more metadata than their balance is worth.
MIN_PART_BYTES = 1 << 20
# Fraction by which a rank may exceed the level before a candidate is cut.
_SLACK = 1 / 128


@dataclass(frozen=True, slots=True)
class Candidates:
    """Items to assign to ranks."""

    nbytes: I64
    """At least 1 per item."""
    slices: I64
    first: I64
    """Start of each item's ranks in `ranks`, then the total."""
    ranks: I64
    """Ranks that hold the items: at least one each, ascending, unique."""
    settled: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Part:
    """Slices [begin, end) of an item for one rank."""

    rank: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """Rank that writes each item (-1: cut), and parts by row."""

    writer: I64
    parts: dict[int, list[Part]] = field(default_factory=dict)


def cut_dim(sizes: Sequence[int]) -> int | None:
    """Return the first dimension with a size above 1."""
    return next((dim for dim, size in enumerate(sizes) if size > 1), None)


def assign(things: Candidates, world_size: int, loads: I64 | None = None) -> Assignment:
    """Assign items or their parts so that all ranks write about the same number of bytes, `loads` included.

    Ranks with the same items exceed their average by at most 1/128 or `MIN_PART_BYTES`.
    """
    holders = np.diff(things.first)
    settled = things.settled | (holders == 1)
    writer = np.where(settled, things.ranks[things.first[:-1]] if len(holders) else 0, -1).astype(np.int64)
    loads = np.zeros(world_size, np.int64) if loads is None else loads.copy()
    np.add.at(loads, writer[settled], things.nbytes[settled])
    groups: dict[bytes, list[int]] = {}
    for row in np.flatnonzero(~settled).tolist():
        held_by = things.ranks[things.first[row] : things.first[row + 1]]
        groups.setdefault(held_by.tobytes(), []).append(row)
    parts: dict[int, list[Part]] = {}
    # Start with small sets of ranks, before candidates with more choice fill them.
    for key, rows in sorted(groups.items(), key=lambda pair: (len(pair[0]), pair[1][0])):
        _fill(things, rows, np.frombuffer(key, np.int64), loads, writer, parts)
    return Assignment(writer, parts)


def _fill(
    things: Candidates,
    rows: list[int],
    holders: npt.NDArray[Any],
    loads: I64,
    writer: I64,
    parts: dict[int, list[Part]],
) -> None:
    level = _level(loads[holders], int(things.nbytes[rows].sum()))
    limit = level + max(MIN_PART_BYTES, level * _SLACK)
    heap = [(int(loads[rank]), rank) for rank in holders.tolist()]
    heapq.heapify(heap)
    sizes, slices = things.nbytes[rows].tolist(), things.slices[rows].tolist()
    for size, row, count in sorted(zip(sizes, rows, slices, strict=True), key=lambda each: (-each[0], each[1])):
        load, rank = heap[0]
        if load + size <= limit or count == 1 or size < 2 * MIN_PART_BYTES:
            heapq.heapreplace(heap, (load + size, rank))
            writer[row] = rank
        else:
            cut = _cut(heap, level, size // count, count)
            if len(cut) > 1:
                parts[row] = cut
            else:
                writer[row] = cut[0].rank
    for load, rank in heap:
        loads[rank] = load


def _cut(heap: list[tuple[int, int]], level: float, slice_bytes: int, slices: int) -> list[Part]:
    least = -(-MIN_PART_BYTES // slice_bytes)
    found: list[Part] = []
    filled: list[tuple[int, int]] = []
    begin = 0
    while begin < slices:
        load, rank = heapq.heappop(heap)
        end = min(slices, begin + max(least, round((level - load) / slice_bytes)))
        if slices - end < least or not heap:
            end = slices
        found.append(Part(rank, begin, end))
        filled.append((load + (end - begin) * slice_bytes, rank))
        begin = end
    for entry in filled:
        heapq.heappush(heap, entry)
    return found


def _level(loads: I64, nbytes: int) -> float:
    ordered = np.sort(loads).tolist()
    poured = nbytes
    for count, load in enumerate(ordered, 1):
        poured += load
        if count == len(ordered) or poured <= ordered[count] * count:
            return float(poured / count)
    return 0.0
