"""The items of a save plan as columns, and write results as columns; records of items are created only on access.

So a plan of 20,000 tensors, or of 3,000 shards on each of 256 ranks, creates no Python object per item. The number of
a tensor, chunk or object in its column, counted from 0, is called its row.
`SavePlan.items` and the write results are `LazyList`s over these columns; iterating over them creates stock's records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import ChunkStorageMetadata, MetadataIndex, StorageInfo
from dcp_core.records.plan import BytesIOWriteData, TensorWriteData, WriteItem, WriteItemType
from dcp_core.records.protocols import WriteResult
from dcp_core.tables.records_of_index import properties_of
from dcp_manifest.index.box_columns import ranges, starts
from dcp_manifest.index.columns import CheckpointIndex
from dcp_manifest.index.items import StoredItem
from dcp_manifest.index.merge_indexes import take_tensors
from dcp_manifest.index.stored_items import StoredItems

__all__ = [
    "PlanColumns",
    "Selection",
    "WrittenColumns",
    "object_item",
    "tensor_facts",
    "write_result",
    "written_of",
]

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Selection:
    """Selection of the items that a rank writes in the final plan, among the items of its local plan."""

    chunks: I64
    """Rows of the selected chunks, ascending."""
    objects: I64
    """Rows of the selected objects, ascending."""
    hints: I64
    """Position of each selected chunk among all chunks of its tensor in the checkpoint."""
    parts: tuple[tuple[int, int, int, int], ...] = ()
    """Parts of cut chunks: (position in `chunks`, dimension, start, end), in elements within the chunk."""

    def __reduce__(self) -> tuple[Callable[..., Selection], tuple[Any, ...]]:
        # Sent between ranks as masks, and in as few bytes as the numbers take.
        largest = int(self.hints.max()) if len(self.hints) else 0
        hints = self.hints.astype(np.min_scalar_type(largest))
        return _selection, (_mask(self.chunks), _mask(self.objects), hints, self.parts)


def _mask(rows: I64) -> U8:
    bits = np.zeros(int(rows[-1]) + 1 if len(rows) else 0, bool)
    bits[rows] = True
    return np.packbits(bits)


def _selection(chunks: U8, objects: U8, hints: I64, parts: tuple[tuple[int, int, int, int], ...]) -> Selection:
    return Selection(
        np.flatnonzero(np.unpackbits(chunks)), np.flatnonzero(np.unpackbits(objects)), hints.astype(np.int64), parts
    )


class PlanColumns:
    """The write items of one rank as columns: the chunks of each tensor, then the objects.

    Args:
        index: Tensors, chunks and objects of the rank, without storage locations.
        whole: For each tensor, 1 if it is an ordinary, unsharded tensor, otherwise 0.
        object_bytes: Size of each object in bytes; -1 for unknown sizes.
        hints: Position of each chunk among all chunks of its tensor in the checkpoint; None before the global plan.
    """

    travels = True

    def __init__(self, index: CheckpointIndex, whole: U8, object_bytes: I64, *, hints: I64 | None = None) -> None:
        self.index = index
        self.whole = whole
        self.object_bytes = object_bytes
        self.hints = hints
        self.chosen: Selection | None = None
        """Selection by which `select` made these columns from those of the local plan; None otherwise. Not pickled."""
        self.order: Sequence[str] | None = None
        """Order of FQNs in which `items` yields the items; None for tensors before objects. Not pickled."""

    def __getstate__(self) -> tuple[CheckpointIndex, U8, I64, I64 | None]:
        return self.index, self.whole, self.object_bytes, self.hints

    def __setstate__(self, state: tuple[CheckpointIndex, U8, I64, I64 | None]) -> None:
        self.index, self.whole, self.object_bytes, self.hints = state
        self.chosen = self.order = None

    def __len__(self) -> int:
        return int(self.index.tensor_chunks.sum()) + len(self.index.object_names)

    def __iter__(self) -> Iterator[WriteItem]:
        for row in range(len(self.index.tensor_names)):
            yield from self.tensor_items(row)
        for name, nbytes in zip(self.index.object_names, self.object_bytes.tolist(), strict=True):
            yield object_item(name, nbytes)

    def tensor_items(self, row: int) -> list[WriteItem]:
        """Return the write items of the tensor in one row, in the order of its chunks."""
        index, name, size = self.index, self.index.tensor_names[row], torch.Size(self.shapes[row])
        properties = properties_of(index.dtypes[index.tensor_dtype[row]], int(index.tensor_flags[row]))
        kind = WriteItemType.TENSOR if self.whole[row] else WriteItemType.SHARD
        dims, first, chunk_row = len(size), self._box_starts[row], self._chunk_starts[row]
        items = []
        for position in range(int(index.tensor_chunks[row])):
            box = slice(first + position * dims, first + (position + 1) * dims)
            offsets, sizes = index.chunk_offsets[box].tolist(), index.chunk_sizes[box].tolist()
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            hint = None if self.hints is None else int(self.hints[chunk_row + position])
            key = MetadataIndex(name, chunk.offsets, hint)
            items.append(WriteItem(key, kind, None, TensorWriteData(chunk, properties, size)))
        return items

    def names(self) -> set[str]:
        """Return the FQNs of all tensors and objects."""
        return {*self.index.tensor_names, *self.index.object_names}

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Global shape of each tensor, in elements."""
        numbers = self.index.tensor_shape.tolist()
        return [tuple(numbers[start:stop]) for start, stop in pairwise(self.index.shape_starts().tolist())]

    @cached_property
    def _box_starts(self) -> list[int]:
        first: list[int] = self.index.box_starts().tolist()
        return first

    @cached_property
    def _chunk_starts(self) -> list[int]:
        first: list[int] = self.index.chunk_starts().tolist()
        return first

    def chunk_rows(self, tensors: I64) -> I64:
        """Return the rows, in the columns of chunks, of all chunks of some tensors.

        Args:
            tensors: Rows of these tensors in the columns of tensors.
        """
        first = self.index.chunk_starts()
        return ranges(first[:-1][tensors], first[1:][tensors])

    def take_tensors(self, rows: I64) -> PlanColumns:
        """Return the columns of the tensors in the given rows, in the order of `rows`, and of all objects."""
        index = take_tensors(self.index, rows)
        index.tensor_names = [self.index.tensor_names[row] for row in rows.tolist()]
        return PlanColumns(index, self.whole[rows], self.object_bytes)

    def select(self, chosen: Selection) -> PlanColumns:
        """Return the columns of the selected chunks and objects; tensors without selected chunks are omitted."""
        index = self.index
        owner = np.repeat(np.arange(len(index.tensor_names)), index.tensor_chunks)
        counts = np.bincount(owner[chosen.chunks], minlength=len(index.tensor_names)).astype(np.int64)
        tensors = np.flatnonzero(counts)
        boxes = starts(index.tensor_ndim[owner])
        first, last = boxes[:-1][chosen.chunks], boxes[1:][chosen.chunks]
        numbers = ranges(first, last)
        offsets, sizes = index.chunk_offsets[numbers], index.chunk_sizes[numbers]
        whole = self.whole[tensors]
        places, row_of_tensor = starts(last - first), starts(counts[tensors])
        for row, dim, begin, end in chosen.parts:
            offsets[places[row] + dim] += begin
            sizes[places[row] + dim] = end - begin
            whole[np.searchsorted(row_of_tensor, row, "right") - 1] = 0
        taken = replace(
            tensor_facts(index, tensors),
            tensor_chunks=counts[tensors],
            chunk_offsets=offsets,
            chunk_sizes=sizes,
            object_names=[index.object_names[row] for row in chosen.objects.tolist()],
            object_owner=index.object_owner[chosen.objects],
        )
        made = PlanColumns(taken, whole, self.object_bytes[chosen.objects], hints=chosen.hints)
        made.chosen, made.order = chosen, self.order
        return made

    def items(self) -> LazyList[WriteItem]:
        """Return the items for `SavePlan.items`: a list whose `WriteItem` records are created on access."""
        return LazyList(self, key=None if self.order is None else _by_name(self.order))


def _by_name(order: Sequence[str]) -> Callable[[WriteItem], int]:
    positions: dict[str, int] = {}

    def position(item: WriteItem) -> int:
        if not positions:  # most lists are never looked at
            positions.update((name, number) for number, name in enumerate(order))
        return positions.get(item.index.fqn, len(positions))

    return position


def tensor_facts(index: CheckpointIndex, tensors: I64) -> CheckpointIndex:
    """Return an index with names, dtypes and shapes of the tensors in the given rows of `index`, without chunks."""
    shapes = index.shape_starts()
    return replace(
        index,
        tensor_names=[index.tensor_names[row] for row in tensors.tolist()],
        tensor_dtype=index.tensor_dtype[tensors],
        tensor_flags=index.tensor_flags[tensors],
        tensor_ndim=index.tensor_ndim[tensors],
        tensor_owner=index.tensor_owner[tensors],
        tensor_shape=index.tensor_shape[ranges(shapes[:-1][tensors], shapes[1:][tensors])],
    )


def object_item(name: str, nbytes: int) -> WriteItem:
    """Return the write item of an object with this FQN and size in bytes (-1 if the size is not known)."""
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, BytesIOWriteData(nbytes) if nbytes >= 0 else None)


class PlannedItems(Protocol):
    """Contract of a sized, iterable source of a plan's write items, whose records are created during iteration."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[WriteItem]: ...


@dataclass(frozen=True)
class WrittenColumns:
    """Write results of one rank as columns: the items, and the location of each item in the data files."""

    planned: PlannedItems
    stored: StoredItems
    """Locations and CRCs of the items in the data files, in the order of the items."""
    travels: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.stored)

    def __iter__(self) -> Iterator[WriteResult]:
        return map(write_result, self.planned, self.stored)


def write_result(item: WriteItem, stored: StoredItem) -> WriteResult:
    """Return the `WriteResult` record for a write item and its location in a data file."""
    return WriteResult(index=item.index, size_in_bytes=stored.length, storage_data=StorageInfo.of(stored))


def written_of(results: Sequence[WriteResult]) -> WrittenColumns | None:
    """Return the columns from which write results are created; None if the results exist as records already."""
    source = results.source if isinstance(results, LazyList) else None
    return source if isinstance(source, WrittenColumns) else None
