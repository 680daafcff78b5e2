"""The global plan of a save: merges the plans of all ranks, checks coverage, and assigns each item to one rank.

Errors in the plans (ranks that contradict each other, holes, overlaps) are only detected here;
`diagnose_duplicates.explain_contradiction` examines the plans again and describes the error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dcp_core.planning.balance import Assignment, Candidates, Part, assign
from dcp_core.planning.merged_table import ChunkTable, Cuts, Names, chunk_sizes, merge_tensors
from dcp_core.records.metadata import Metadata
from dcp_core.records.plan import SavePlan
from dcp_core.tables.columns_of_items import columns_of
from dcp_core.tables.metadata_columns import metadata_from_index
from dcp_core.tables.plan_columns import PlanColumns, Selection
from dcp_core.tables.records_of_index import dtype_of
from dcp_manifest.index.box_columns import distinct, starts
from dcp_manifest.index.columns import CheckpointIndex
from dcp_manifest.index.coverage import is_proper

__all__ = ["plan_columns"]

I64 = npt.NDArray[np.int64]


def plan_columns(
    all_plans: Sequence[SavePlan],
    aliases: Mapping[str, str],
    *,
    complete: bool | None,
    to_lowest_rank: bool,
    pinned_to_lowest: Collection[str],
) -> tuple[list[SavePlan], Metadata] | None:
    """Return the final save plan of each rank, and the metadata of the checkpoint.

    Args:
        all_plans: Local save plans of all ranks, in rank order.
        aliases: Tied tensors that are not written: alias → FQN under which the tensor is written.
        complete: Whether chunks must fill tensors completely; None to check neither coverage nor overlaps nor bounds.
        to_lowest_rank: Whether each item is written by the lowest rank that holds it, without balancing.
        pinned_to_lowest: FQNs whose items are always written by the lowest rank that holds them.

    Returns:
        The plans in rank order, and the metadata; None if the ranks contradict each other or the chunks leave holes or
        overlap.

    Raises:
        PlanError: The items of one rank's plan contradict each other, or are incomplete.
    """
    whole_plans = [columns_of(plan.items) for plan in all_plans]
    kept_rows = [_rows_without(one, aliases) for one in whole_plans]
    known = [one if kept is None else one.take_tensors(kept) for one, kept in zip(whole_plans, kept_rows, strict=True)]
    names = Names(known)
    merged = merge_tensors(known, names)
    if merged is None:
        return None
    table = ChunkTable(known, names, merged)
    if not table.consistent or (complete is not None and not is_proper(merged, complete=complete)):
        return None
    things = _candidates(
        known,
        names,
        merged,
        table,
        splittable=np.array([plan.splittable for plan in all_plans], bool),
        lowest=None if to_lowest_rank else frozenset(pinned_to_lowest),
    )
    assigned = assign(things, len(known))
    cuts = Cuts(merged, assigned.parts)
    targets = np.array([names.tensors[target] for target in aliases.values()], np.uint32)
    index = replace(cuts.index, alias_names=list(aliases), alias_targets=targets)
    own_parts: dict[int, dict[int, tuple[int, Part]]] = {}
    for row, parts in assigned.parts.items():
        for number, part in enumerate(parts):
            own_parts.setdefault(part.rank, {})[row] = number, part
    plans = []
    for rank, (plan, one, kept) in enumerate(zip(all_plans, whole_plans, kept_rows, strict=True)):
        chosen = _chosen(rank, names, table, cuts, assigned, own_parts.get(rank, {}))
        if kept is not None:
            chosen = replace(chosen, chunks=one.chunk_rows(kept)[chosen.chunks])
        plans.append(replace(plan, items=one.select(chosen).items()))
    return plans, metadata_from_index(index)


def _candidates(
    known: Sequence[PlanColumns],
    names: Names,
    merged: CheckpointIndex,
    table: ChunkTable,
    *,
    splittable: npt.NDArray[np.bool_],
    lowest: frozenset[str] | None,
) -> Candidates:
    """Return the candidates: merged chunks, then objects; `lowest`: names for the lowest rank (None: all)."""
    item_bytes = np.array([dtype_of(name).itemsize for name in merged.dtypes] or [1], np.int64)
    volumes, slices = chunk_sizes(merged)
    # Pairs of candidate and rank that holds it, each once, in ascending order.
    chunks, world = len(volumes), len(known)
    object_bytes = np.ones(len(names.objects), np.int64)
    held = [table.box * world + table.rank]
    for rank, (one, rows) in enumerate(zip(known, names.object_rows, strict=True)):
        np.maximum.at(object_bytes, rows, one.object_bytes)
        held.append((chunks + rows) * world + rank)
    pairs = distinct(np.concatenate(held))
    thing, ranks = np.divmod(pairs, world)
    first = starts(np.bincount(thing, minlength=chunks + len(object_bytes)))
    settled = np.full(chunks + len(object_bytes), lowest is None)
    if lowest:
        pinned = [row for row, name in enumerate(merged.tensor_names) if name in lowest]
        settled[:chunks] = np.isin(table.tensor, pinned)
        settled[chunks:] = [name in lowest for name in names.objects]
    if chunks:
        slices[~np.logical_and.reduceat(splittable[ranks[: first[chunks]]], first[:chunks])] = 1
    return Candidates(
        nbytes=np.concatenate([np.maximum(volumes * item_bytes[merged.tensor_dtype[table.tensor]], 1), object_bytes]),
        slices=np.concatenate([slices, np.ones(len(object_bytes), np.int64)]),
        first=first,
        ranks=ranks,
        settled=settled,
    )


def _rows_without(columns: PlanColumns, names: Mapping[str, str]) -> I64 | None:
    """Return the rows of the tensors that are not among `names`; None for all rows."""
    index = columns.index
    if not names or names.keys().isdisjoint(index.tensor_names):
        return None
    return np.array([row for row, name in enumerate(index.tensor_names) if name not in names], np.int64)


def _chosen(
    rank: int,
    names: Names,
    table: ChunkTable,
    cuts: Cuts,
    assigned: Assignment,
    own: Mapping[int, tuple[int, Part]],
) -> Selection:
    """Return the selection of one rank: the boxes that it writes, each once and whole or in part."""
    boxes = table.box[table.first_row[rank] : table.first_row[rank + 1]]
    once = np.zeros(len(boxes), bool)
    once[np.unique(boxes, return_index=True)[1]] = True
    # From the rank's own boxes alone: going over all boxes for each rank would be quadratic in the number of ranks.
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
    object_rows = names.object_rows[rank] + len(cuts.first) - 1
    return Selection(rows, np.flatnonzero(assigned.writer[object_rows] == rank), cuts.hint[merged_rows], tuple(parts))
