"""Coverage check of tensors, on columns: chunks are inside their tensor, do not overlap, and leave no hole.

Most tensors have one chunk, or are sharded along one dimension or into a grid: all of these are checked together, with
one sort per dimension. Tensors that are sharded in other ways are checked one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcp_manifest.index.box_columns import distinct, starts
from dcp_manifest.index.boxes import find_overlap
from dcp_manifest.index.columns import CheckpointIndex

__all__ = ["SameDims", "by_dims", "coverage_problems", "is_proper"]

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SameDims:
    """Chunks of all tensors with the same number of dimensions, in the order of the table of chunks."""

    rows: I64
    """Row of each chunk in the table of chunks."""
    tensor: I64
    """Row of each chunk's tensor in the table of tensors, ascending."""
    offsets: I64
    """Offsets of the chunks in their tensors, in elements; an array of (chunks, dimensions)."""
    sizes: I64
    shapes: I64
    """Shape of each chunk's tensor, in elements; an array of (chunks, dimensions)."""


def by_dims(index: CheckpointIndex) -> Iterator[SameDims]:
    """Yield the chunks of an index, grouped by number of dimensions."""
    tensor = np.repeat(np.arange(len(index.tensor_chunks)), index.tensor_chunks)
    ndim = index.tensor_ndim[tensor]
    first, shape_first = starts(ndim)[:-1], index.shape_starts()[:-1]
    for dims in distinct(ndim).tolist():
        rows = np.flatnonzero(ndim == dims)
        numbers = first[rows][:, None] + np.arange(dims)
        shapes = index.tensor_shape[shape_first[tensor[rows]][:, None] + np.arange(dims)]
        yield SameDims(rows, tensor[rows], index.chunk_offsets[numbers], index.chunk_sizes[numbers], shapes)


def is_proper(index: CheckpointIndex, *, complete: bool) -> bool:
    """Whether every chunk is inside its tensor, no two chunks overlap and, if `complete`, chunks leave no hole.

    Also False if a tensor has no chunks.
    """
    if not (index.tensor_chunks > 0).all():
        return False
    return all(_is_proper(chunks, complete=complete) for chunks in by_dims(index))


def coverage_problems(index: CheckpointIndex) -> list[tuple[str, str]]:
    """Return (name, problem as a sentence) for each tensor whose chunks do not cover it exactly."""
    if is_proper(index, complete=True):
        return []
    found: list[tuple[str, str]] = []
    chunk_starts, box_starts, shape_starts = index.chunk_starts(), index.box_starts(), index.shape_starts()
    for row, name in enumerate(index.tensor_names):
        ndim, count = int(index.tensor_ndim[row]), int(chunk_starts[row + 1] - chunk_starts[row])
        numbers = slice(int(box_starts[row]), int(box_starts[row + 1]))
        offsets, sizes = (box[numbers].reshape(count, ndim) for box in (index.chunk_offsets, index.chunk_sizes))
        shape = tuple(index.tensor_shape[shape_starts[row] : shape_starts[row + 1]].tolist())
        problem = _problem(offsets, sizes, shape)
        if problem is not None:
            found.append((name, problem))
    return found


def _problem(offsets: I64, sizes: I64, shape: tuple[int, ...]) -> str | None:
    boxes = [(tuple(offset), tuple(size)) for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
    pair = find_overlap(boxes)
    if pair is not None:
        one, two = (f"{offset}+{size}" for offset, size in (boxes[position] for position in pair))
        return f"the chunks {one} and {two} (offsets+sizes) store the same elements"
    stored, wanted = sum(math.prod(size) for _, size in boxes), math.prod(shape)
    return None if stored == wanted else f"chunks hold {stored} of the {wanted} elements of shape {shape}"


def _is_proper(chunks: SameDims, *, complete: bool) -> bool:
    offsets, sizes, shapes = chunks.offsets, chunks.sizes, chunks.shapes
    if (offsets < 0).any() or (sizes < 0).any() or (offsets + sizes > shapes).any():
        return False
    volumes = sizes.prod(axis=1)
    groups = _group_starts(chunks.tensor)
    if complete and not np.array_equal(np.add.reduceat(volumes, groups), shapes[groups].prod(axis=1)):
        return False
    filled = np.flatnonzero(volumes > 0)
    return len(filled) == 0 or _are_apart(chunks.tensor[filled], offsets[filled], sizes[filled])


def _group_starts(tensor: I64) -> I64:
    """Return the position of the first chunk of each tensor."""
    return np.flatnonzero(np.concatenate([[True], tensor[1:] != tensor[:-1]]))


def _are_apart(tensor: I64, offsets: I64, sizes: I64) -> bool:
    groups = _group_starts(tensor)
    counts = np.diff(np.concatenate([groups, [len(tensor)]]))
    cut = np.maximum.reduceat(offsets, groups, axis=0) != np.minimum.reduceat(offsets, groups, axis=0)
    cuts = cut.sum(axis=1)
    if ((cuts == 0) & (counts > 1)).any():
        return False
    along_one = np.repeat(cuts == 1, counts)
    if along_one.any():
        dim = np.repeat(cut.argmax(axis=1) if cut.shape[1] else np.zeros(len(groups), np.int64), counts)[along_one]
        rows = np.flatnonzero(along_one)
        begin, end, owner = offsets[rows, dim], offsets[rows, dim] + sizes[rows, dim], tensor[rows]
        order = np.lexsort((begin, owner))
        begin, end, owner = begin[order], end[order], owner[order]
        if ((owner[1:] == owner[:-1]) & (begin[1:] < end[:-1])).any():
            return False
    along_more = np.flatnonzero(np.repeat(cuts > 1, counts))
    for group in _not_in_grids(tensor[along_more], offsets[along_more], sizes[along_more]):
        rows = np.flatnonzero(tensor == group)
        if find_overlap(list(zip(offsets[rows].tolist(), sizes[rows].tolist(), strict=True))) is not None:
            return False
    return True


def _not_in_grids(tensor: I64, offsets: I64, sizes: I64) -> list[int]:
    """Return the tensors whose chunks may not form a grid: only their boxes can overlap.

    In a grid, two boxes with different starts in a dimension do not overlap there, and no two have all starts equal.
    """
    doubtful = [np.zeros(0, np.int64)]
    order = np.lexsort((*offsets.T, tensor))
    alike = (tensor[order][1:] == tensor[order][:-1]) & (offsets[order][1:] == offsets[order][:-1]).all(axis=1)
    doubtful.append(tensor[order][1:][alike])
    for begin, size in zip(offsets.T, sizes.T, strict=True) if len(tensor) else ():
        order = np.lexsort((begin, tensor))
        owner, first, end = tensor[order], begin[order], (begin + size)[order]
        groups = np.flatnonzero(np.concatenate([[True], (owner[1:] != owner[:-1]) | (first[1:] != first[:-1])]))
        last = np.maximum.reduceat(end, groups)
        clash = (owner[groups][1:] == owner[groups][:-1]) & (last[:-1] > first[groups][1:])
        doubtful.append(owner[groups][1:][clash])
    found: list[int] = distinct(np.concatenate(doubtful)).tolist()
    return found
