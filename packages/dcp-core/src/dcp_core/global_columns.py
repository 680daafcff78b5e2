"""The global plan over columns: what `global_plan` does with records, for plans whose items nobody has looked at.

Whatever is out of the ordinary (ranks that contradict each other, holes, overlaps) is left to `global_plan`, which
finds it again and says what it is: nothing is reported here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dcp_core.balance import choose_writers
from dcp_core.columns import metadata_from_index, paths_of
from dcp_core.index_records import StateRecords
from dcp_core.lazy import LazyDict
from dcp_core.merged_columns import ChunkTable, Names, merge_tensors
from dcp_core.metadata import Metadata
from dcp_core.plan import SavePlan
from dcp_core.plan_columns import PlanColumns, WrittenColumns, columns_of, written_of
from dcp_core.protocols import WriteResult
from dcp_core.sweep import is_proper
from dcp_manifest.columns import CheckpointIndex
from dcp_manifest.stored_items import StoredItems

__all__ = ["index_with_items", "plan_columns"]

I64 = npt.NDArray[np.int64]


def plan_columns(
    all_plans: Sequence[SavePlan],
    aliases: Mapping[str, str],
    *,
    complete: bool,
    to_lowest_rank: bool,
    pinned_to_lowest: Collection[str],
) -> tuple[list[SavePlan], Metadata] | None:
    """One plan for each rank, and the metadata that they add up to.

    Args:
        all_plans: Of all ranks, in order.
        aliases: Tied tensors that are not written: alias → the name that is.
        complete: Whether chunks must make up whole tensors.
        to_lowest_rank: Give each item to the lowest rank that has it instead of balancing.
        pinned_to_lowest: FQNs that always go to the lowest rank that has them.

    Returns:
        None if a plan is no columns any more, or if something is wrong.
    """
    columns = [columns_of(plan.items) for plan in all_plans]
    known = [_without(one, aliases) for one in columns if one is not None]
    if len(known) < len(all_plans):
        return None
    names = Names(known)
    merged = merge_tensors(known, names)
    if merged is None:
        return None
    table = ChunkTable(known, names, merged)
    if not table.consistent or not is_proper(merged, complete=complete):
        return None
    writer, object_writer = choose_writers(
        known, merged, table, to_lowest_rank=to_lowest_rank, pinned_to_lowest=frozenset(pinned_to_lowest)
    )
    targets = np.array([names.tensors[target] for target in aliases.values()], np.uint32)
    metadata = metadata_from_index(replace(merged, alias_names=list(aliases), alias_targets=targets))
    plans = [
        replace(plan, items=_kept(one, rank, table, writer, object_writer).items())
        for rank, (plan, one) in enumerate(zip(all_plans, known, strict=True))
    ]
    return plans, metadata


def index_with_items(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> CheckpointIndex | None:
    """The index of a save whose metadata and results are still columns; None if they are not.

    Args:
        metadata: As `plan_columns` made it; a planner may have given it other `planner_data`.
        results: Of each rank.

    Raises:
        UnsupportedValueError: `planner_data` is not of a form that a manifest can hold.
    """
    entries = metadata.state_dict_metadata
    source = entries.source if isinstance(entries, LazyDict) and not entries.touched else None
    written = [written_of(result) for result in results]
    known = [one for one in written if one is not None]
    if not isinstance(source, StateRecords) or len(known) < len(results):
        return None
    index = source.index
    rows = _rows_in_index(source, known)
    if rows is None:
        return None
    stored = StoredItems.joined([one.stored for one in known])
    order = np.argsort(rows, kind="stable")
    chunks = int(index.tensor_chunks.sum())
    return replace(
        index,
        files=stored.files,
        chains=stored.chains,
        chunk_items=stored.take(order[:chunks]).columns,
        object_items=stored.take(order[chunks:]).columns,
        paths=paths_of(metadata.planner_data),
    )


def _rows_in_index(source: StateRecords, written: Sequence[WrittenColumns]) -> I64 | None:
    """Of each item that was written, its row: chunks first, then objects; None unless each row occurs once."""
    index, chunks = source.index, int(source.index.tensor_chunks.sum())
    first = index.chunk_starts()
    parts = []
    for one in written:
        planned = one.planned
        if planned.hints is None:
            return None
        try:
            tensors = np.array([source.tensors[name] for name in planned.index.tensor_names], np.int64)
            objects = np.array([source.objects[name] for name in planned.index.object_names], np.int64)
        except KeyError:
            return None
        parts += [first[np.repeat(tensors, planned.index.tensor_chunks)] + planned.hints, chunks + objects]
    rows = np.concatenate([np.zeros(0, np.int64), *parts])
    return rows if np.array_equal(np.sort(rows), np.arange(chunks + len(index.object_names))) else None


def _without(columns: PlanColumns, names: Mapping[str, str]) -> PlanColumns:
    index = columns.index
    if not names or names.keys().isdisjoint(index.tensor_names):
        return columns
    kept = np.array([row for row, name in enumerate(index.tensor_names) if name not in names], np.int64)
    return columns.take_tensors(kept)


def _kept(
    columns: PlanColumns, rank: int, table: ChunkTable, writer: I64, object_writer: Mapping[str, int]
) -> PlanColumns:
    """What one rank writes of what it holds, each box once, with the positions of chunks."""
    own = slice(table.first_row[rank], table.first_row[rank + 1])
    boxes = table.box[own]
    once = np.zeros(len(boxes), bool)
    once[np.unique(boxes, return_index=True)[1]] = True
    rows = np.flatnonzero(once & (writer[boxes] == rank))
    objects = [row for row, name in enumerate(columns.index.object_names) if object_writer[name] == rank]
    return columns.take(rows, np.array(objects, np.int64), hints=table.hint[boxes[rows]])
