"""Save plans and write results as columns, without a Python object per item; a *row* is a position in a column."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from dcp_core.errors import PlanError
from dcp_core.records.foreign_records import as_write_item
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import (
    MEMORY_FORMATS,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageInfo,
    TensorProperties,
    properties_of,
)
from dcp_core.records.protocols import BytesIOWriteData, TensorWriteData, WriteItem, WriteItemType, WriteResult
from dcp_manifest.index.columns import CheckpointIndex, StoredItem, TensorFlags, ranges, starts
from dcp_manifest.index.stored_items import StoredItems
from dcp_manifest.types import I64


@dataclass(frozen=True, slots=True)
class Selection:
    """Items that the rank writes."""

    chunks: I64
    objects: I64
    hints: I64
    parts: tuple[tuple[int, int, int, int], ...] = ()
    """Parts of cut chunks: (position in `chunks`, dimension, start, end), in elements within the chunk."""

    def __reduce__(self) -> tuple[Callable[..., Selection], tuple[Any, ...]]:
        # Ranks exchange selections as masks and narrow integers.
        largest = int(self.hints.max()) if len(self.hints) else 0
        hints = self.hints.astype(np.min_scalar_type(largest))
        return _selection, (_mask(self.chunks), _mask(self.objects), hints, self.parts)


def _mask(rows: I64) -> npt.NDArray[np.uint8]:
    bits = np.zeros(int(rows[-1]) + 1 if len(rows) else 0, bool)
    bits[rows] = True
    return np.packbits(bits)


def _selection(
    chunks: npt.NDArray[np.uint8],
    objects: npt.NDArray[np.uint8],
    hints: I64,
    parts: tuple[tuple[int, int, int, int], ...],
) -> Selection:
    return Selection(
        np.flatnonzero(np.unpackbits(chunks)), np.flatnonzero(np.unpackbits(objects)), hints.astype(np.int64), parts
    )


class PlanColumns:
    """One rank's write items: the chunks of each tensor, then the objects (bytes: -1 if unknown).

    `hints` are chunks' positions in their tensors in the checkpoint; None if the planner has not decided them. `order`
    is the state dict's order of FQNs for records; without it, objects follow tensors.
    """

    travels = True

    def __init__(
        self, table: CheckpointIndex, whole: npt.NDArray[np.uint8], object_bytes: I64, *, hints: I64 | None = None
    ) -> None:
        self.table = table
        self.whole = whole
        self.object_bytes = object_bytes
        self.hints = hints
        self.chosen: Selection | None = None
        self.chosen_from: weakref.ref[PlanColumns] | None = None
        self.order: Sequence[str] | None = None
        # The last three are not pickled.

    def __getstate__(self) -> tuple[CheckpointIndex, npt.NDArray[np.uint8], I64, I64 | None]:
        return self.table, self.whole, self.object_bytes, self.hints

    def __setstate__(self, state: tuple[CheckpointIndex, npt.NDArray[np.uint8], I64, I64 | None]) -> None:
        self.table, self.whole, self.object_bytes, self.hints = state
        self.chosen = self.chosen_from = self.order = None

    def __len__(self) -> int:
        return int(self.table.tensor_chunks.sum()) + len(self.table.object_names)

    def __iter__(self) -> Iterator[WriteItem]:
        for row in range(len(self.table.tensor_names)):
            yield from self.tensor_items(row)
        for name, nbytes in zip(self.table.object_names, self.object_bytes.tolist(), strict=True):
            yield object_item(name, nbytes)

    def tensor_items(self, row: int) -> list[WriteItem]:
        """Return a tensor's write items."""
        table, name, size = self.table, self.table.tensor_names[row], torch.Size(self.shapes[row])
        properties = properties_of(table.dtypes[table.tensor_dtype[row]], int(table.tensor_flags[row]))
        kind = WriteItemType.TENSOR if self.whole[row] else WriteItemType.SHARD
        dims, first, chunk_row = len(size), self._box_starts[row], self._chunk_starts[row]
        items = []
        for position in range(int(table.tensor_chunks[row])):
            box = slice(first + position * dims, first + (position + 1) * dims)
            offsets, sizes = table.chunk_offsets[box].tolist(), table.chunk_sizes[box].tolist()
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            hint = None if self.hints is None else int(self.hints[chunk_row + position])
            key = MetadataIndex(name, chunk.offsets, hint)
            items.append(WriteItem(key, kind, None, TensorWriteData(chunk, properties, size)))
        return items

    def names(self) -> set[str]:
        """Return all FQNs."""
        return {*self.table.tensor_names, *self.table.object_names}

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Global shape per tensor."""
        numbers = self.table.tensor_shape.tolist()
        return [tuple(numbers[start:stop]) for start, stop in pairwise(self.table.shape_starts().tolist())]

    @cached_property
    def _box_starts(self) -> list[int]:
        first: list[int] = self.table.box_starts().tolist()
        return first

    @cached_property
    def _chunk_starts(self) -> list[int]:
        first: list[int] = self.table.chunk_starts().tolist()
        return first

    def select(self, chosen: Selection) -> PlanColumns:
        """Return the selected chunks and objects."""
        taken, tensors = take_chunks(self.table, chosen.chunks, chosen.objects)
        whole = self.whole[tensors]
        if chosen.parts:
            of_tensor = np.repeat(np.arange(len(tensors)), taken.tensor_chunks)
            places = starts(taken.tensor_ndim[of_tensor])
            for row, dim, begin, end in chosen.parts:
                taken.chunk_offsets[places[row] + dim] += begin
                taken.chunk_sizes[places[row] + dim] = end - begin
                whole[of_tensor[row]] = 0
        made = PlanColumns(taken, whole, self.object_bytes[chosen.objects], hints=chosen.hints)
        made.chosen, made.chosen_from, made.order = chosen, weakref.ref(self), self.order
        return made

    def items(self) -> LazyList[WriteItem]:
        """Return `SavePlan.items`, with records created on access."""
        return LazyList(self, key=None if self.order is None else self._position)

    def _position(self, item: WriteItem) -> int:
        return self._positions.get(item.index.fqn, len(self._positions))

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.order or ())}


def take_chunks(index: CheckpointIndex, chunks: I64, objects: I64) -> tuple[CheckpointIndex, I64]:
    """Return chunks, grouped by tensor, and objects as an index without aliases; and its tensors' rows."""
    owner = np.repeat(np.arange(len(index.tensor_chunks)), index.tensor_chunks)
    own = owner[chunks]
    begins = np.flatnonzero(np.concatenate([np.ones(min(1, len(own)), bool), own[1:] != own[:-1]]))
    tensors = own[begins]
    shapes, boxes = index.shape_starts(), starts(index.tensor_ndim[owner])
    numbers = ranges(boxes[:-1][chunks], boxes[1:][chunks])
    taken = replace(
        index,
        tensor_names=[index.tensor_names[row] for row in tensors.tolist()],
        tensor_dtype=index.tensor_dtype[tensors],
        tensor_flags=index.tensor_flags[tensors],
        tensor_ndim=index.tensor_ndim[tensors],
        tensor_owner=index.tensor_owner[tensors],
        tensor_shape=index.tensor_shape[ranges(shapes[:-1][tensors], shapes[1:][tensors])],
        tensor_chunks=np.diff(np.append(begins, len(own))),
        chunk_offsets=index.chunk_offsets[numbers],
        chunk_sizes=index.chunk_sizes[numbers],
        object_names=[index.object_names[row] for row in objects.tolist()],
        object_owner=index.object_owner[objects],
        alias_names=[],
        alias_targets=np.zeros(0, np.uint32),
    )
    return taken, tensors


def object_item(name: str, nbytes: int) -> WriteItem:
    """Return an object's write item; `nbytes` is -1 if unknown."""
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, BytesIOWriteData(nbytes) if nbytes >= 0 else None)


@dataclass(frozen=True)
class WrittenColumns:
    """One rank's write items and their locations in data files."""

    planned: PlanColumns | PlannedRows
    stored: StoredItems
    travels: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.stored)

    def __iter__(self) -> Iterator[WriteResult]:
        return map(write_result, self.planned, self.stored)


def write_result(item: WriteItem, stored: StoredItem) -> WriteResult:
    """Return an item's result."""
    return WriteResult(index=item.index, size_in_bytes=stored.length, storage_data=StorageInfo.of(stored))


def written_of(results: Sequence[WriteResult]) -> WrittenColumns | None:
    """Return results' columns; None if they are records."""
    source = results.source if isinstance(results, LazyList) else None
    return source if isinstance(source, WrittenColumns) else None


@dataclass(frozen=True, eq=False)
class PlannedRows:
    """A rank's final plan as rows of the checkpoint's index."""

    index: CheckpointIndex
    chunks: I64
    objects: I64
    whole: npt.NDArray[np.uint8]
    """1 per unsharded tensor, else 0."""
    object_bytes: I64
    chosen: Selection | None = None
    chosen_from: Callable[[], PlanColumns] | None = None
    """Local items of which these were chosen."""

    def __len__(self) -> int:
        return len(self.chunks) + len(self.objects)

    def __iter__(self) -> Iterator[WriteItem]:
        return iter(self.columns())

    def columns(self) -> PlanColumns:
        """Return the original columns."""
        if self.chosen is not None and self.chosen_from is not None:
            return self.chosen_from().select(self.chosen)
        taken, tensors = take_chunks(self.index, self.chunks, self.objects)
        hints = self.chunks - self.index.chunk_starts()[:-1][np.repeat(tensors, taken.tensor_chunks)]
        return PlanColumns(taken, self.whole, self.object_bytes, hints=hints)


class ColumnBuilder:
    """Builds `PlanColumns`: add tensors, then call `columns`."""

    def __init__(self) -> None:
        self._dtypes: dict[torch.dtype, int] = {}
        self._names: list[str] = []
        self._kinds: list[tuple[int, int, int, int, int]] = []  # dtype, flags, dimensions, chunks, whole
        self._shapes: list[int] = []
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self._may_be_pinned = torch.accelerator.is_available()

    def add_plain(self, fqn: str, tensor: torch.Tensor) -> None:
        """Add an unsharded tensor as one chunk."""
        shape = tensor.shape
        dims = len(shape)
        self._names.append(fqn)
        flags = int(tensor.requires_grad)
        # `is_pinned` would copy a lazily conjugated or negated tensor.
        if self._may_be_pinned and tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg()):
            flags |= tensor.is_pinned() << 1
        self._kinds.append((self._dtypes.setdefault(tensor.dtype, len(self._dtypes)), flags, dims, 1, 1))
        if dims:
            self._shapes.extend(shape)
            self._sizes.extend(shape)
            self._offsets.extend((0,) * dims)

    def add(
        self,
        fqn: str,
        properties: TensorProperties,
        size: Sequence[int],
        chunks: Sequence[ChunkStorageMetadata],
        *,
        whole: bool,
    ) -> None:
        """Add a tensor with this rank's chunks."""
        self._names.append(fqn)
        dtype = self._dtypes.setdefault(properties.dtype, len(self._dtypes))
        if properties.layout is torch.strided and properties.memory_format is torch.contiguous_format:
            flags = properties.requires_grad | properties.pin_memory << 1
        else:
            flags = TensorFlags(
                requires_grad=properties.requires_grad,
                pin_memory=properties.pin_memory,
                memory_format=MEMORY_FORMATS.index(properties.memory_format),
                layout=str(properties.layout).removeprefix("torch."),
            ).to_bits()
        self._kinds.append((dtype, flags, len(size), len(chunks), whole))
        self._shapes.extend(size)
        for chunk in chunks:
            self._offsets.extend(chunk.offsets)
            self._sizes.extend(chunk.sizes)

    def columns(self, objects: list[str], object_bytes: Sequence[int] | None = None) -> PlanColumns:
        """Return the columns; objects' bytes are None if unknown."""
        kinds = np.array(self._kinds, np.int64).reshape(-1, 5)
        index = CheckpointIndex(
            dtypes=tuple([str(dtype).removeprefix("torch.") for dtype in self._dtypes]),
            tensor_names=self._names,
            tensor_dtype=kinds[:, 0].astype(np.uint8),
            tensor_flags=kinds[:, 1].astype(np.uint8),
            tensor_ndim=kinds[:, 2].astype(np.uint8),
            tensor_owner=np.zeros(len(kinds), np.uint32),
            tensor_shape=np.array(self._shapes, np.int64),
            tensor_chunks=kinds[:, 3].copy(),
            chunk_offsets=np.array(self._offsets, np.int64),
            chunk_sizes=np.array(self._sizes, np.int64),
            object_names=objects,
            object_owner=np.zeros(len(objects), np.uint32),
            alias_targets=np.zeros(0, np.uint32),
        )
        sizes = np.full(len(objects), -1, np.int64) if object_bytes is None else np.array(object_bytes, np.int64)
        return PlanColumns(index, kinds[:, 4].astype(np.uint8), sizes)


def columns_of(items: Sequence[WriteItem]) -> PlanColumns:
    """Return items as columns; PlanError if records are inconsistent."""
    source = items.source if isinstance(items, LazyList) else None
    if isinstance(source, PlanColumns):
        return source
    if isinstance(source, PlannedRows):
        return source.columns()
    # Iterating over a lazy list would convert it to an ordinary list.
    return _of_records(items if source is None else source)


def _of_records(items: Iterable[WriteItem]) -> PlanColumns:
    tensors: dict[str, list[tuple[WriteItem, TensorWriteData]]] = {}
    objects: dict[str, int] = {}
    order: dict[str, None] = {}
    for item in map(as_write_item, items):  # stock's helpers return stock's items
        fqn, data = item.index.fqn, item.tensor_data
        order[fqn] = None
        if item.type == WriteItemType.BYTE_IO:
            objects[fqn] = -1 if item.bytes_io_data is None else item.bytes_io_data.nbytes
        elif data is None:
            raise PlanError(f"the plan's tensor item {fqn!r} has no tensor_data; a planner must fill it in")
        else:
            tensors.setdefault(fqn, []).append((item, data))
    table = ColumnBuilder()
    hints: list[int | None] = []
    for fqn, boxes in tensors.items():
        if fqn in objects:
            raise PlanError(f"{fqn!r} is planned twice, once as an object; give the values different names")
        first = boxes[0][1]
        for _, data in boxes:
            _check_box(fqn, first, data)
        whole = all(item.type == WriteItemType.TENSOR for item, _ in boxes)
        table.add(fqn, first.properties, first.size, [data.chunk for _, data in boxes], whole=whole)
        hints += [item.index.index for item, _ in boxes]
    columns = table.columns([*objects], [*objects.values()])
    columns.order = tuple(order)
    known = [hint for hint in hints if hint is not None]
    if len(known) == len(hints):
        columns.hints = np.array(known, np.int64)
    return columns


def _check_box(fqn: str, first: TensorWriteData, data: TensorWriteData) -> None:
    if first.size != data.size or first.properties.dtype != data.properties.dtype:
        raise PlanError(
            f"shards of {fqn!r} do not belong together: {first.properties.dtype} {tuple(first.size)} and "
            f"{data.properties.dtype} {tuple(data.size)}"
        )
    if not len(data.chunk.offsets) == len(data.chunk.sizes) == len(data.size):
        raise PlanError(
            f"{fqn!r} of shape {tuple(data.size)} is planned with offsets {tuple(data.chunk.offsets)} and sizes "
            f"{tuple(data.chunk.sizes)}, which have another number of dimensions"
        )
