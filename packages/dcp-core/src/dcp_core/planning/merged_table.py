"""Merged table of the save plans of all ranks: each tensor, object and chunk once, and chunks cut into parts.

The number of a tensor, object or chunk in a table is called its row. This module only detects that ranks contradict
each other; `diagnose_duplicates` describes the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dcp_core.planning.balance import Part, cut_dim
from dcp_core.tables.plan_columns import PlanColumns
from dcp_manifest.index.box_columns import distinct, ranges, starts
from dcp_manifest.index.columns import CheckpointIndex
from dcp_manifest.index.coverage import by_dims

__all__ = ["ChunkTable", "Cuts", "Names", "chunk_sizes", "merge_tensors"]

I64 = npt.NDArray[np.int64]


class Names:
    """Numbering of tensors and objects: which row of the merged table each rank's tensors and objects have.

    Args:
        columns: Save plans of all ranks as columns, in rank order.
    """

    def __init__(self, columns: Sequence[PlanColumns]) -> None:
        self.tensors: dict[str, int] = {}
        self.objects: dict[str, int] = {}
        self.tensor_rows: list[I64] = []
        self.object_rows: list[I64] = []
        for one in columns:
            self.tensor_rows.append(_rows(one.index.tensor_names, self.tensors))
            self.object_rows.append(_rows(one.index.object_names, self.objects))


def _rows(names: Sequence[str], table: dict[str, int]) -> I64:
    return np.array([table.setdefault(name, len(table)) for name in names], np.int64)


def merge_tensors(columns: Sequence[PlanColumns], names: Names) -> CheckpointIndex | None:
    """Merge the tensors and objects of all ranks into an index without chunks.

    Args:
        columns: Save plans of all ranks as columns, in rank order.
        names: Rows of the tensors and objects in the merged table.

    Returns:
        The index; None if a name has different shapes, dtypes or kinds on different ranks.
    """
    if not names.tensors.keys().isdisjoint(names.objects):
        return None
    dtypes: dict[str, int] = {}
    facts = {}
    for field in ("dtype", "flags", "ndim"):
        facts[field] = np.zeros(len(names.tensors), np.uint8)
    first_rank = np.full(len(names.tensors), -1, np.int64)
    shapes: list[I64] = []
    for rank, (one, rows) in enumerate(zip(columns, names.tensor_rows, strict=True)):
        index = one.index
        table = np.array([dtypes.setdefault(name, len(dtypes)) for name in index.dtypes] or [0], np.uint8)
        own = {"dtype": table[index.tensor_dtype], "flags": index.tensor_flags, "ndim": index.tensor_ndim}
        new = first_rank[rows] < 0
        for field, values in own.items():
            facts[field][rows[new]] = values[new]
        if any(not np.array_equal(facts[field][rows], own[field]) for field in ("dtype", "ndim")):
            return None
        first_rank[rows[new]] = rank
        shapes.append(index.shape_starts())
    shape_starts = starts(facts["ndim"])
    shape = np.zeros(int(shape_starts[-1]), np.int64)
    for rank, (one, rows) in enumerate(zip(columns, names.tensor_rows, strict=True)):
        places = ranges(shape_starts[:-1][rows], shape_starts[1:][rows])
        own_new = np.repeat(first_rank[rows] == rank, one.index.tensor_ndim)
        shape[places[own_new]] = one.index.tensor_shape[own_new]
        if not np.array_equal(shape[places], one.index.tensor_shape):
            return None
    return CheckpointIndex(
        dtypes=tuple(dtypes),
        tensor_names=list(names.tensors),
        tensor_dtype=facts["dtype"],
        tensor_flags=facts["flags"],
        tensor_ndim=facts["ndim"],
        tensor_owner=np.zeros(len(names.tensors), np.uint32),
        tensor_shape=shape,
        object_names=list(names.objects),
        object_owner=np.zeros(len(names.objects), np.uint32),
    )


class ChunkTable:
    """Table of the chunks of all ranks, which finds chunks that are the same box of the same tensor.

    The constructor fills the chunk columns of `merged` with each box once, ordered by tensor and then by rank.

    Args:
        columns: Save plans of all ranks as columns, in rank order.
        names: Rows of the tensors and objects in the merged table.
        merged: Index without chunks, from `merge_tensors`.
    """

    def __init__(self, columns: Sequence[PlanColumns], names: Names, merged: CheckpointIndex) -> None:
        counts = [one.index.tensor_chunks for one in columns]
        tensor = np.concatenate(
            [np.zeros(0, np.int64), *(np.repeat(r, c) for r, c in zip(names.tensor_rows, counts, strict=True))]
        )
        self.rank = np.repeat(np.arange(len(columns)), [int(count.sum()) for count in counts])
        self.first_row = starts(np.array([int(count.sum()) for count in counts]))
        """Row of each rank's first chunk in this table."""
        every = replace(
            merged,
            chunk_offsets=np.concatenate([np.zeros(0, np.int64), *(one.index.chunk_offsets for one in columns)]),
            chunk_sizes=np.concatenate([np.zeros(0, np.int64), *(one.index.chunk_sizes for one in columns)]),
        )
        first, same, self.consistent = _first_of_equal(tensor, merged.tensor_ndim[tensor], every)
        order = first[np.argsort(tensor[first], kind="stable")]
        position = np.empty(len(tensor), np.int64)
        position[order] = np.arange(len(order))
        self.box = position[same]
        """For each chunk of each rank, its row in the merged table of chunks."""
        self.tensor = tensor[order]
        """For each chunk of the merged table, the row of its tensor."""
        merged.tensor_chunks = np.bincount(tensor[order], minlength=len(merged.tensor_names)).astype(np.int64)
        places = starts(merged.tensor_ndim[tensor])
        numbers = ranges(places[:-1][order], places[1:][order])
        merged.chunk_offsets, merged.chunk_sizes = every.chunk_offsets[numbers], every.chunk_sizes[numbers]


def chunk_sizes(index: CheckpointIndex) -> tuple[I64, I64]:
    """Return the number of elements of each chunk, and the number of equal slices into which each could be cut."""
    volumes, slices = (np.ones(int(index.tensor_chunks.sum()), np.int64) for _ in range(2))
    for chunks in by_dims(index):
        volumes[chunks.rows] = chunks.sizes.prod(axis=1)
        for dim in reversed(range(chunks.sizes.shape[1])):
            size = chunks.sizes[:, dim]
            slices[chunks.rows] = np.where(size > 1, size, slices[chunks.rows])
    return volumes, slices


class Cuts:
    """Index of a checkpoint in which some chunks of a merged table are replaced by the parts into which they are cut.

    Args:
        merged: Merged table, with all chunks.
        parts: Row of a chunk → parts of that chunk, in ascending order.
    """

    def __init__(self, merged: CheckpointIndex, parts: Mapping[int, Sequence[Part]]) -> None:
        counts = np.ones(int(merged.tensor_chunks.sum()), np.int64)
        for row, cut in parts.items():
            counts[row] = len(cut)
        self.first = starts(counts)
        """Row of each chunk's first part in the new table, and the number of rows as the last element."""
        tensor = np.repeat(np.arange(len(merged.tensor_chunks)), merged.tensor_chunks)
        self.dim = np.zeros(len(counts), np.int64)
        """For each chunk that is cut, the dimension along which it is cut."""
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
        """For each chunk of the new table, its position among the chunks of its tensor."""


def _first_of_equal(tensor: I64, ndim: npt.NDArray[np.uint8], index: CheckpointIndex) -> tuple[I64, I64, bool]:
    """Return the first rows of chunks with equal tensor and offsets; each row's first; whether sizes agree."""
    same = np.arange(len(tensor))
    consistent = True
    places = starts(ndim)[:-1]
    for dims in distinct(ndim).tolist():
        rows = np.flatnonzero(ndim == dims)
        numbers = places[rows][:, None] + np.arange(dims)
        offsets, sizes = index.chunk_offsets[numbers], index.chunk_sizes[numbers]
        keys = (*(offsets[:, dim] for dim in reversed(range(dims))), tensor[rows])
        order = np.lexsort(keys)  # stable: of equal ones the lowest rank comes first
        ordered_offsets, ordered_tensor, ordered_sizes = offsets[order], tensor[rows][order], sizes[order]
        new = np.ones(len(rows), bool)
        new[1:] = (ordered_tensor[1:] != ordered_tensor[:-1]) | (ordered_offsets[1:] != ordered_offsets[:-1]).any(
            axis=1
        )
        leader = np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
        consistent = consistent and bool((ordered_sizes == ordered_sizes[leader]).all())
        same[rows[order]] = rows[order[leader]]
    return np.flatnonzero(same == np.arange(len(tensor))), same, consistent
