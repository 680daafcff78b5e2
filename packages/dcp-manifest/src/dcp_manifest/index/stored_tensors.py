"""Records of tensors and objects in an index. Columns are far faster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dcp_manifest.index.columns import CheckpointIndex, StoredItem
from dcp_manifest.index.dtypes import ITEM_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunk:
    """A chunk (box) of a tensor, and the location of its data. Compared by identity; can be a dict key."""

    name: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: StoredItem

    @property
    def nbytes(self) -> int:
        """Decoded size, bytes; without transforms, also the stored size."""
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor in an index, with its chunks in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    flags: int
    """See `TensorFlags.to_bits`."""
    chunks: tuple[StoredChunk, ...]


class TensorForm(NamedTuple):
    """A tensor for `tensor_columns`, with the boxes (offsets and sizes) in which it is stored.

    Example:
        ```python
        from dcp_manifest.index.stored_tensors import TensorForm, tensor_columns

        halves = [((0, 0), (2, 2)), ((2, 0), (2, 2))]
        index = tensor_columns([TensorForm("weight", "float32", (4, 2), halves)])
        print(index.tensor_chunks)
        ```
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    flags: int = 0
    """See `TensorFlags.to_bits`."""


def stored_tensors(index: CheckpointIndex) -> Iterator[StoredTensor]:
    """Yield the tensors in order, without aliases; none if stored items are missing."""
    if index.chunk_items is None:
        return
    items, ragged = index.chunk_items, index.ragged_starts(index.chunk_items)
    chunk_starts, box_starts = index.chunk_starts().tolist(), index.box_starts().tolist()
    shape_starts = index.shape_starts().tolist()
    for row, name in enumerate(index.tensor_names):
        dtype = index.dtypes[index.tensor_dtype[row]]
        first, last = chunk_starts[row], chunk_starts[row + 1]
        numbers = slice(box_starts[row], box_starts[row + 1])
        boxes = (last - first, int(index.tensor_ndim[row]))
        offsets = index.chunk_offsets[numbers].reshape(boxes).tolist()
        sizes = index.chunk_sizes[numbers].reshape(boxes).tolist()
        chunks = []
        for at, offset, size in zip(range(first, last), offsets, sizes, strict=True):
            chunks.append(StoredChunk(name, dtype, tuple(offset), tuple(size), index.stored_item(items, at, ragged)))
        yield StoredTensor(
            name,
            dtype,
            tuple(index.tensor_shape[shape_starts[row] : shape_starts[row + 1]].tolist()),
            int(index.tensor_flags[row]),
            tuple(chunks),
        )


def tensor_columns(tensors: Sequence[TensorForm]) -> CheckpointIndex:
    """Return an index of tensors of the whole job; the caller adds stored items."""
    dtypes = {name: number for number, name in enumerate(dict.fromkeys(tensor.dtype for tensor in tensors))}
    boxes = [box for tensor in tensors for box in tensor.boxes]
    return CheckpointIndex(
        dtypes=tuple(dtypes),
        tensor_names=[tensor.name for tensor in tensors],
        tensor_dtype=np.array([dtypes[tensor.dtype] for tensor in tensors], np.uint8),
        tensor_flags=np.array([tensor.flags for tensor in tensors], np.uint8),
        tensor_ndim=np.array([len(tensor.shape) for tensor in tensors], np.uint8),
        tensor_owner=np.zeros(len(tensors), np.uint32),
        tensor_shape=np.array([size for tensor in tensors for size in tensor.shape], np.int64),
        tensor_chunks=np.array([len(tensor.boxes) for tensor in tensors], np.int64),
        chunk_offsets=np.array([number for offsets, _ in boxes for number in offsets], np.int64),
        chunk_sizes=np.array([number for _, sizes in boxes for number in sizes], np.int64),
    )


def stored_objects(index: CheckpointIndex) -> Iterator[tuple[str, StoredItem]]:
    """Yield each object's name and stored item; none if stored items are missing."""
    if index.object_items is None:
        return
    ragged = index.ragged_starts(index.object_items)
    for row, name in enumerate(index.object_names):
        yield name, index.stored_item(index.object_items, row, ragged)
