"""Whether the chunks of a tensor cover it exactly: no element missing, none stored twice. Boxes only, no bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dcp_manifest.index.columns import CheckpointIndex

__all__ = ["coverage_problems"]

_ROWS = 512
Boxes = npt.NDArray[np.int64]


def coverage_problems(index: CheckpointIndex) -> list[tuple[str, str]]:
    """For every tensor whose chunks do not cover it exactly, its name and a sentence that says where."""
    problems: list[tuple[str, str]] = []
    chunk_starts, box_starts, shape_starts = index.chunk_starts(), index.box_starts(), index.shape_starts()
    for row, name in enumerate(index.tensor_names):
        ndim = int(index.tensor_ndim[row])
        count = int(chunk_starts[row + 1] - chunk_starts[row])
        numbers = slice(int(box_starts[row]), int(box_starts[row + 1]))
        shape = tuple(index.tensor_shape[shape_starts[row] : shape_starts[row + 1]].tolist())
        offsets = index.chunk_offsets[numbers].reshape(count, ndim)
        sizes = index.chunk_sizes[numbers].reshape(count, ndim)
        problem = _problem(shape, offsets, sizes)
        if problem is not None:
            problems.append((name, problem))
    return problems


def _problem(shape: tuple[int, ...], offsets: Boxes, sizes: Boxes) -> str | None:
    filled = (sizes > 0).all(axis=1)
    offsets, sizes = offsets[filled], sizes[filled]
    pair = _overlap(offsets, offsets + sizes)
    if pair is not None:
        one, two = (f"{tuple(offsets[n].tolist())}+{tuple(sizes[n].tolist())}" for n in pair)
        return f"the chunks {one} and {two} (offsets+sizes) store the same elements"
    wanted = int(np.prod(shape, dtype=np.int64))
    stored = int(sizes.prod(axis=1, dtype=np.int64).sum())
    if stored != wanted:
        return f"chunks hold {stored} of the {wanted} elements of shape {shape}"
    return None


def _overlap(starts: Boxes, stops: Boxes) -> tuple[int, int] | None:
    """Two boxes that share an element, if any do."""
    count = len(starts)
    for first in range(0, count, _ROWS):
        rows = slice(first, first + _ROWS)
        shared = np.ones((len(starts[rows]), count), np.bool_)
        for dim in range(starts.shape[1]):
            shared &= starts[rows, dim, None] < stops[None, :, dim]
            shared &= starts[None, :, dim] < stops[rows, dim, None]
        own = np.arange(len(shared))
        shared[own, first + own] = False
        if shared.any():
            one, two = np.argwhere(shared)[0].tolist()
            return first + one, two
    return None
