"""Who writes what several ranks hold: the largest first, each to the rank with the least to write.

Source: torch 2.13 `_dedup_save_plans.dedup_save_plans` (contract; stock weighs a shard by its global tensor).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from dcp_core.index_records import dtype_of
from dcp_core.merged_columns import ChunkTable
from dcp_core.plan_columns import PlanColumns
from dcp_core.sweep import by_dims
from dcp_manifest.box_columns import starts
from dcp_manifest.columns import CheckpointIndex

__all__ = ["choose_writers"]

I64 = npt.NDArray[np.int64]


def choose_writers(
    columns: Sequence[PlanColumns],
    merged: CheckpointIndex,
    table: ChunkTable,
    *,
    to_lowest_rank: bool,
    pinned_to_lowest: Collection[str],
) -> tuple[I64, dict[str, int]]:
    """The rank that writes each merged chunk, and each object by name; of equal loads the lower rank.

    Args:
        columns: Of each rank.
        merged: Tensors and chunks of all ranks, each box once.
        table: Who holds which chunk.
        to_lowest_rank: Give each item to the lowest rank that has it instead of balancing.
        pinned_to_lowest: FQNs that always go to the lowest rank that has them.
    """
    item_bytes = np.array([dtype_of(name).itemsize for name in merged.dtypes] or [1], np.int64)
    nbytes = np.maximum(_volumes(merged) * item_bytes[merged.tensor_dtype[table.tensor]], 1)
    # Who holds a box: pairs of box and rank, each once, in ascending order.
    pairs = np.unique(table.box * len(columns) + table.rank)
    box, rank = np.divmod(pairs, len(columns))
    holders = np.bincount(box, minlength=len(nbytes))
    first = starts(holders)[:-1]
    writer = rank[first] if len(rank) else np.zeros(0, np.int64)
    loads = np.zeros(len(columns), np.int64)
    alone = (holders == 1) | to_lowest_rank
    pinned = [row for row, name in enumerate(merged.tensor_names) if name in pinned_to_lowest]
    if pinned:
        alone |= np.isin(table.tensor, pinned)
    np.add.at(loads, writer[alone], nbytes[alone])
    object_holders: dict[str, list[int]] = {}
    object_bytes: dict[str, int] = {}
    for number, one in enumerate(columns):
        for name, size in zip(one.index.object_names, one.object_bytes.tolist(), strict=True):
            object_holders.setdefault(name, []).append(number)
            object_bytes[name] = max(object_bytes.get(name, 1), size)
    object_writer: dict[str, int] = {}
    for name, held_by in object_holders.items():
        if len(held_by) == 1 or to_lowest_rank or name in pinned_to_lowest:
            object_writer[name] = held_by[0]
            loads[held_by[0]] += object_bytes[name]
    shared = [(-int(nbytes[row]), 0, row, "") for row in np.flatnonzero(~alone).tolist()]
    shared += [(-size, 1, 0, name) for name, size in object_bytes.items() if name not in object_writer]
    heapq.heapify(shared)
    while shared:
        size, is_object, row, name = heapq.heappop(shared)
        held = np.array(object_holders[name]) if is_object else rank[first[row] : first[row] + holders[row]]
        chosen = int(held[np.argmin(loads[held])])
        loads[chosen] -= size
        if is_object:
            object_writer[name] = chosen
        else:
            writer[row] = chosen
    return writer, object_writer


def _volumes(index: CheckpointIndex) -> I64:
    volumes = np.ones(int(index.tensor_chunks.sum()), np.int64)
    for chunks in by_dims(index):
        volumes[chunks.rows] = chunks.sizes.prod(axis=1)
    return volumes
