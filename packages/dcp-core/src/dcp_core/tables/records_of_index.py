"""Sources of the lazy dicts in a loaded `Metadata`: create records from the columns of an index on access.

The conversion of records into columns is in `metadata_columns`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from dcp_core.errors import UnsupportedFormatError
from dcp_core.records.lazy import LazyDict
from dcp_core.records.metadata import (
    MEMORY_FORMATS,
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_manifest import needed_bytes
from dcp_manifest.index.columns import CheckpointIndex, ItemColumns, TensorFlags

__all__ = ["StateRecords", "StorageRecords", "dtype_of", "properties_of", "records_of"]

Boxes = list[tuple[int, ...]]


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype for its name in a manifest. Raises UnsupportedFormatError if torch has no such dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedFormatError(
            f"the checkpoint holds tensors of dtype {name!r}, which torch {torch.__version__} lacks"
        )
    return dtype


def properties_of(dtype: str, flags: int) -> TensorProperties:
    """Return a tensor's properties from the dtype name and the flags in a manifest."""
    found = TensorFlags.from_bits(flags)
    return TensorProperties(
        dtype=dtype_of(dtype),
        layout=getattr(torch, found.layout),
        requires_grad=found.requires_grad,
        memory_format=MEMORY_FORMATS[found.memory_format],
        pin_memory=found.pin_memory,
    )


class StateRecords:
    """Source of `Metadata.state_dict_metadata`: FQN → metadata record of a tensor or object.

    Args:
        index: Index of the checkpoint.
        owner: Owner in a merged index of rank-local indexes, whose tensors and objects are included in addition to
            those of the whole job; None for no owner.
    """

    def __init__(self, index: CheckpointIndex, owner: int | None) -> None:
        self.index = index
        self._shape_starts = index.shape_starts().tolist()
        self._box_starts = index.box_starts().tolist()
        self.chunk_starts: list[int] = index.chunk_starts().tolist()
        self.tensors: dict[str, int] = {}
        self.objects: dict[str, int] = {}
        for wanted in (0, owner):
            if wanted is None:
                continue
            for row in np.flatnonzero(index.tensor_owner == wanted).tolist():
                self.objects.pop(index.tensor_names[row], None)
                self.tensors[index.tensor_names[row]] = row
            for row in np.flatnonzero(index.object_owner == wanted).tolist():
                self.tensors.pop(index.object_names[row], None)
                self.objects[index.object_names[row]] = row
        for name, row in zip(index.alias_names, index.alias_targets.tolist(), strict=True):
            self.tensors[name] = row

    def __len__(self) -> int:
        return len(self.tensors) + len(self.objects)

    def make(self, key: object) -> STORAGE_TYPES:
        """Create and return the metadata record for an FQN. Raises KeyError for an unknown FQN."""
        if key in self.objects:
            return BytesStorageMetadata()
        return self._tensor(self.tensors[cast("str", key)])

    def has(self, key: object) -> bool:
        """Return whether the checkpoint has a tensor or object with this FQN."""
        return key in self.tensors or key in self.objects

    @cached_property
    def single(self) -> list[tuple[int, ...] | None]:
        """For each row, the shape of the tensor if it is stored in one chunk, otherwise None."""
        index = self.index
        starts, shapes = self._shape_starts, index.tensor_shape.tolist()
        found: list[tuple[int, ...] | None] = [None] * len(index.tensor_names)
        candidates = np.flatnonzero(index.tensor_chunks == 1).tolist()
        boxes, offsets, sizes = self._box_starts, index.chunk_offsets.tolist(), index.chunk_sizes.tolist()
        for row in candidates:
            shape = shapes[starts[row] : starts[row + 1]]
            box = slice(boxes[row], boxes[row + 1])
            if sizes[box] == shape and not any(offsets[box]):
                found[row] = tuple(shape)
        return found

    @cached_property
    def dtypes(self) -> list[torch.dtype | None]:
        """The dtypes in the index's table of dtypes; None for a dtype that this version of torch does not have."""
        return [getattr(torch, name, None) for name in self.index.dtypes]

    def is_same_data(self, one: str, other: str) -> bool:
        """Return whether two tensors have the same stored data: they were tied at the save, or have equal CRCs.

        Args:
            one: FQN of a tensor in the checkpoint.
            other: FQN of another tensor in the checkpoint.
        """
        first, second = self.tensors[one], self.tensors[other]
        checksum = self._checksum(first)
        return first == second or (checksum is not None and checksum == self._checksum(second))

    def _checksum(self, row: int) -> tuple[int, ...] | None:
        """Return the checksums that identify a tensor row's stored bytes; None for several chunks or no checksum."""
        stored = self.index.chunk_items
        if stored is None or self.single[row] is None:
            return None
        chunk = self.chunk_starts[row]
        if not stored.checked[chunk]:
            return None
        columns = (stored.crc32, stored.stored_bytes, stored.framing, stored.chain)
        return int(self.index.tensor_dtype[row]), *(int(column[chunk]) for column in columns)

    def keys(self) -> Iterator[str]:
        """Yield all FQNs: first of tensors, then of objects."""
        return itertools.chain(self.tensors, self.objects)

    def items(self) -> Iterator[tuple[str, STORAGE_TYPES]]:
        """Yield all pairs (FQN, metadata record): first tensors, then objects."""
        for name, row in self.tensors.items():
            yield name, self._tensor(row)
        for name in self.objects:
            yield name, BytesStorageMetadata()

    def offsets(self, row: int) -> Boxes:
        """Return the offsets of all chunks, in elements, of the tensor in one row."""
        return self._boxes(self.index.chunk_offsets, row)

    def _boxes(self, numbers: np.ndarray[Any, np.dtype[np.int64]], row: int) -> Boxes:
        count = self.chunk_starts[row + 1] - self.chunk_starts[row]
        ndim = int(self.index.tensor_ndim[row])
        if ndim == 0:
            return [()] * count
        flat = numbers[self._box_starts[row] : self._box_starts[row + 1]].tolist()
        return list(zip(*[iter(flat)] * ndim, strict=True))

    def _tensor(self, row: int) -> TensorStorageMetadata:
        index = self.index
        shape = index.tensor_shape[self._shape_starts[row] : self._shape_starts[row + 1]].tolist()
        boxes = zip(self.offsets(row), self._boxes(index.chunk_sizes, row), strict=True)
        return TensorStorageMetadata(
            properties=properties_of(index.dtypes[index.tensor_dtype[row]], int(index.tensor_flags[row])),
            size=torch.Size(shape),
            chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes],
        )


def records_of(metadata: Metadata) -> StateRecords | None:
    """Return the `StateRecords` of metadata that was read from a manifest and not changed; None for other metadata."""
    entries = metadata.state_dict_metadata
    source = entries.source if isinstance(entries, LazyDict) and not entries.touched else None
    return source if isinstance(source, StateRecords) else None


class StorageRecords:
    """Source of `Metadata.storage_data`: `MetadataIndex` → `StorageInfo`, from the columns of an index."""

    def __init__(self, records: StateRecords) -> None:
        self._records = records
        self._index = records.index

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        starts = self._records.chunk_starts
        chunks = 0
        if self._index.chunk_items is not None:
            chunks = sum(starts[row + 1] - starts[row] for row in self._records.tensors.values())
        return chunks + (len(self._records.objects) if self._index.object_items is not None else 0)

    def make(self, key: object) -> StorageInfo:
        """Create and return the storage location of an item. Raises KeyError for an unknown item."""
        row, columns = self._row(key)
        return self._chunk(row) if columns is self._index.chunk_items else self._object(row)

    def has(self, key: object) -> bool:
        """Return whether the checkpoint has an item with this `MetadataIndex`."""
        try:
            return self._row(key)[1] is not None
        except KeyError:
            return False

    def file_bytes(self) -> dict[str, int]:
        """Return the size of each data file in bytes: the end of its last item."""
        return needed_bytes(self._index)

    def keys(self) -> Iterator[MetadataIndex]:
        """Yield the `MetadataIndex` of all items: the chunks of all tensors, then the objects."""
        if self._index.chunk_items is not None:
            for name, row in self._records.tensors.items():
                for position, offset in enumerate(self._records.offsets(row)):
                    yield MetadataIndex(name, offset, position)
        if self._index.object_items is not None:
            yield from map(MetadataIndex, self._records.objects)

    def _row(self, key: object) -> tuple[int, ItemColumns | None]:
        """Return the row of an item, and the columns that have this row. Raises KeyError if there is none."""
        if not isinstance(key, MetadataIndex):
            raise KeyError(key)
        if key.offset is None:
            return self._records.objects[key.fqn], self._index.object_items
        row = self._records.tensors[key.fqn]
        offsets = self._records.offsets(row)
        wanted = tuple(key.offset)
        hint = key.index
        position = hint if hint is not None and 0 <= hint < len(offsets) and offsets[hint] == wanted else None
        if position is None:
            if wanted not in offsets:
                raise KeyError(key)
            position = offsets.index(wanted)
        return self._records.chunk_starts[row] + position, self._index.chunk_items

    def items(self) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
        """Yield all pairs (`MetadataIndex`, `StorageInfo`): the chunks of all tensors, then the objects."""
        if self._index.chunk_items is not None:
            for name, row in self._records.tensors.items():
                start = self._records.chunk_starts[row]
                for position, offset in enumerate(self._records.offsets(row)):
                    yield MetadataIndex(name, offset, position), self._chunk(start + position)
        if self._index.object_items is not None:
            for name, row in self._records.objects.items():
                yield MetadataIndex(name), self._object(row)

    @cached_property
    def _chunk(self) -> Callable[[int], StorageInfo]:
        return _locations(self._index, self._index.chunk_items)

    @cached_property
    def _object(self) -> Callable[[int], StorageInfo]:
        return _locations(self._index, self._index.object_items)


def _locations(index: CheckpointIndex, columns: ItemColumns | None) -> Callable[[int], StorageInfo]:
    """Return a function from the row of an item to its location. Raises KeyError if nothing is stored."""
    if columns is None:
        raise KeyError("nothing is stored")
    ragged = index.ragged_starts(columns)
    return lambda row: StorageInfo.of(index.stored_item(columns, row, ragged))
