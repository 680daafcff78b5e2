"""Lazy records of an index (`dcp_manifest.CheckpointIndex`), and a finished save's index."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from dcp_core.errors import PlanError, UnsupportedValueError
from dcp_core.records.foreign_records import as_index
from dcp_core.records.lazy import LazyDict
from dcp_core.records.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorStorageMetadata,
    properties_of,
    stored_item,
)
from dcp_core.records.protocols import WriteResult
from dcp_core.tables.plan_columns import ColumnBuilder, PlanColumns, PlannedRows, WrittenColumns, written_of
from dcp_manifest.index.columns import (
    CheckpointIndex,
    ItemColumns,
    PathElement,
    StoredItem,
    needed_bytes,
    ranges,
    starts,
)
from dcp_manifest.index.stored_items import StoredItems
from dcp_manifest.stock.stock_write import STOCK_VERSION
from dcp_manifest.types import I64

Boxes = list[tuple[int, ...]]
_Box = tuple[Sequence[int], Sequence[int]]
_FEW_CHUNKS = 64


class StateRecords:
    """Source of `state_dict_metadata`, without values of single ranks."""

    def __init__(self, index: CheckpointIndex) -> None:
        self.index = index
        self._shape_starts = index.shape_starts().tolist()
        self._box_starts = index.box_starts().tolist()
        self.chunk_starts: list[int] = index.chunk_starts().tolist()
        self.tensors = {index.tensor_names[row]: row for row in np.flatnonzero(index.tensor_owner == 0).tolist()}
        self.objects = {index.object_names[row]: row for row in np.flatnonzero(index.object_owner == 0).tolist()}
        self.tensors.update(zip(index.alias_names, index.alias_targets.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.tensors) + len(self.objects)

    def make(self, key: object) -> STORAGE_TYPES:
        """See `LazySource`."""
        if key in self.objects:
            return BytesStorageMetadata()
        return self._tensor(self.tensors[cast("str", key)])

    def has(self, key: object) -> bool:
        """See `LazySource`."""
        return key in self.tensors or key in self.objects

    @cached_property
    def single(self) -> list[tuple[int, ...] | None]:
        """Shape per tensor in one chunk, else None."""
        index = self.index
        shape_starts, box_starts, shapes = index.shape_starts(), index.box_starts(), index.tensor_shape
        found: list[tuple[int, ...] | None] = [None] * len(index.tensor_names)
        candidates = np.flatnonzero(index.tensor_chunks == 1)
        boxes = ranges(box_starts[candidates], box_starts[candidates + 1])
        own = shapes[ranges(shape_starts[candidates], shape_starts[candidates + 1])]
        differ = (index.chunk_sizes[boxes] != own) | (index.chunk_offsets[boxes] != 0)
        problems = starts(differ)[starts(index.tensor_ndim[candidates])]
        numbers, first = shapes.tolist(), self._shape_starts
        for row in candidates[problems[1:] == problems[:-1]].tolist():
            found[row] = tuple(numbers[first[row] : first[row + 1]])
        return found

    @cached_property
    def dtypes(self) -> list[torch.dtype | None]:
        """Dtype per tensor; None if this torch lacks it."""
        known = [getattr(torch, name, None) for name in self.index.dtypes]
        return [known[number] for number in self.index.tensor_dtype.tolist()]

    def is_same_data(self, one: str, other: str) -> bool:
        """Return whether tensors were tied or have equal CRCs."""
        first, second = self.tensors[one], self.tensors[other]
        checksum = self._checksum(first)
        return first == second or (checksum is not None and checksum == self._checksum(second))

    def are_known_to_differ(self, one: str, other: str) -> bool:
        """Return whether tensors of one dtype, with equal chunks and encodings, have other CRCs."""
        index, stored = self.index, self.index.chunk_items
        rows = self.tensors[one], self.tensors[other]
        if stored is None or len({*rows}) == 1 or len({*index.tensor_dtype[[*rows]].tolist()}) > 1:
            return False
        boxes = [(self.offsets(row), self._boxes(index.chunk_sizes, row)) for row in rows]
        first, second = (slice(self.chunk_starts[row], self.chunk_starts[row + 1]) for row in rows)
        if boxes[0] != boxes[1] or not (stored.checked[first].all() and stored.checked[second].all()):
            return False
        alike = all(
            np.array_equal(each[first], each[second]) for each in (stored.stored_bytes, stored.framing, stored.chain)
        )
        return alike and not np.array_equal(stored.crc32[first], stored.crc32[second])

    def _checksum(self, row: int) -> tuple[int, ...] | None:
        stored = self.index.chunk_items
        if stored is None or self.single[row] is None:
            return None
        chunk = self.chunk_starts[row]
        if not stored.checked[chunk]:
            return None
        columns = (stored.crc32, stored.stored_bytes, stored.framing, stored.chain)
        return int(self.index.tensor_dtype[row]), *(int(column[chunk]) for column in columns)

    def keys(self) -> Iterator[str]:
        """Yield all FQNs, tensors first."""
        return itertools.chain(self.tensors, self.objects)

    def items(self) -> Iterator[tuple[str, STORAGE_TYPES]]:
        """See `LazySource`."""
        for name, row in self.tensors.items():
            yield name, self._tensor(row)
        for name in self.objects:
            yield name, BytesStorageMetadata()

    def offsets(self, row: int) -> Boxes:
        """Return a tensor's chunk offsets."""
        return self._boxes(self.index.chunk_offsets, row)

    def box(self, row: int, position: int | None) -> _Box | None:
        """Return a tensor's chunk (offsets, sizes); None if it has no such chunk."""
        if position is None or not 0 <= position < self.chunk_starts[row + 1] - self.chunk_starts[row]:
            return None
        ndim = int(self.index.tensor_ndim[row])
        own = slice(self._box_starts[row] + position * ndim, self._box_starts[row] + (position + 1) * ndim)
        return tuple(self.index.chunk_offsets[own].tolist()), tuple(self.index.chunk_sizes[own].tolist())

    def near(self, name: str, boxes: Sequence[_Box]) -> tuple[TensorStorageMetadata, list[int]] | None:
        """Return a tensor's entry with the chunks that overlap `boxes` alone, and their positions; None for few chunks.

        Records of all chunks of a large job take minutes, and gigabytes.
        """
        row, index, dims = self.tensors.get(name), self.index, {len(start) for start, _ in boxes}
        if row is None or index.tensor_chunks[row] <= _FEW_CHUNKS or dims != {int(index.tensor_ndim[row])}:
            return None
        shape = index.tensor_shape[self._shape_starts[row] : self._shape_starts[row + 1]].tolist()
        own = slice(self._box_starts[row], self._box_starts[row + 1])
        offsets, sizes = (each[own].reshape(-1, len(shape)) for each in (index.chunk_offsets, index.chunk_sizes))
        kept = np.zeros(len(offsets), np.bool_)
        for start, extent in boxes:
            kept |= (np.minimum(offsets + sizes, np.add(start, extent)) > np.maximum(offsets, start)).all(axis=1)
        places: list[int] = np.flatnonzero(kept).tolist()
        return self._entry(row, shape, zip(offsets[kept].tolist(), sizes[kept].tolist(), strict=True)), places

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
        return self._entry(row, shape, zip(self.offsets(row), self._boxes(index.chunk_sizes, row), strict=True))

    def _entry(self, row: int, shape: Sequence[int], boxes: Iterable[_Box]) -> TensorStorageMetadata:
        index = self.index
        return TensorStorageMetadata(
            properties=properties_of(index.dtypes[index.tensor_dtype[row]], int(index.tensor_flags[row])),
            size=torch.Size(shape),
            chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes],
        )


def records_of(metadata: Metadata, key: str | None = None) -> StateRecords | None:
    """Return unchanged metadata's `StateRecords`, or None. With `key`, its entry alone must be unchanged."""
    entries = metadata.state_dict_metadata
    if not isinstance(entries, LazyDict) or (entries.touched if key is None else dict.__contains__(entries, key)):
        return None
    return entries.source if isinstance(entries.source, StateRecords) else None


class StorageRecords:
    """Source of `Metadata.storage_data`."""

    def __init__(self, records: StateRecords, index: CheckpointIndex) -> None:
        self._records = records
        self._index = index
        self._ragged: dict[int, tuple[list[int], list[int]]] = {}

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
        """See `LazySource`."""
        row, columns = self._row(key)
        return self._location(columns, row)

    def has(self, key: object) -> bool:
        """See `LazySource`."""
        try:
            return self._row(key)[1] is not None
        except KeyError:
            return False

    def file_bytes(self) -> dict[str, int]:
        """Return bytes per file."""
        return needed_bytes(self._index)

    def keys(self) -> Iterator[MetadataIndex]:
        """Yield all keys, chunks before objects."""
        if self._index.chunk_items is not None:
            for name, row in self._records.tensors.items():
                for position, offset in enumerate(self._records.offsets(row)):
                    yield MetadataIndex(name, offset, position)
        if self._index.object_items is not None:
            yield from map(MetadataIndex, self._records.objects)

    def _row(self, key: object) -> tuple[int, ItemColumns | None]:
        if not isinstance(key, MetadataIndex):
            raise KeyError(key)
        if key.offset is None:
            return self._records.objects[key.fqn], self._index.object_items
        row, wanted, position = self._records.tensors[key.fqn], tuple(key.offset), key.index
        hinted = self._records.box(row, position)
        if position is None or hinted is None or hinted[0] != wanted:
            offsets = self._records.offsets(row)
            if wanted not in offsets:
                raise KeyError(key)
            position = offsets.index(wanted)
        return self._records.chunk_starts[row] + position, self._index.chunk_items

    def items(self) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
        """See `LazySource`."""
        if self._index.chunk_items is not None:
            for name, row in self._records.tensors.items():
                start = self._records.chunk_starts[row]
                for position, offset in enumerate(self._records.offsets(row)):
                    yield (
                        MetadataIndex(name, offset, position),
                        self._location(self._index.chunk_items, start + position),
                    )
        if self._index.object_items is not None:
            for name, row in self._records.objects.items():
                yield MetadataIndex(name), self._location(self._index.object_items, row)

    def _location(self, columns: ItemColumns | None, row: int) -> StorageInfo:
        if columns is None:
            raise KeyError("nothing is stored")
        ragged = self._ragged.get(id(columns))
        if ragged is None:
            ragged = self._ragged[id(columns)] = self._index.ragged_starts(columns)
        return StorageInfo.of(self._index.stored_item(columns, row, ragged))


_MODULES = ["dcp-manifest/1"]


def metadata_from_index(index: CheckpointIndex) -> Metadata:
    """Return metadata with lazy records; the index must not change afterwards.

    Values of single ranks are left out. Aliases are separate entries, as in stock.
    """
    records = StateRecords(index)
    return Metadata(
        state_dict_metadata=LazyDict(records),
        planner_data=None if index.paths is None else dict(index.paths),
        storage_data=None
        if index.chunk_items is None and index.object_items is None
        else LazyDict(StorageRecords(records, index)),
        storage_meta=None if index.info is None else StorageMeta(save_id=index.info.save_id, modules=list(_MODULES)),
        version=STOCK_VERSION,
        aliases={
            name: index.tensor_names[row]
            for name, row in zip(index.alias_names, index.alias_targets.tolist(), strict=True)
        }
        or None,
    )


def index_from_metadata(metadata: Metadata, *, aliases: Mapping[str, str] | None = None) -> CheckpointIndex:
    """Return an index in the records' order; PlanError if an item has no location."""
    aliases = aliases or {}
    entries = [(name, record) for name, record in metadata.state_dict_metadata.items() if name not in aliases]
    tensors = [(name, record) for name, record in entries if isinstance(record, TensorStorageMetadata)]
    objects = [name for name, record in entries if not isinstance(record, TensorStorageMetadata)]
    table = ColumnBuilder()
    for name, record in tensors:
        table.add(name, record.properties, record.size, record.chunks, whole=False)
    index = table.columns(objects).table
    index.paths = paths_of(metadata.planner_data)
    _put_aliases(index, aliases)
    if metadata.storage_data is not None:
        chunks = [MetadataIndex(name, chunk.offsets) for name, record in tensors for chunk in record.chunks]
        stored = _stored_items([*chunks, *map(MetadataIndex, objects)], metadata.storage_data)
        index.files, index.chains = stored.files, stored.chains
        index.chunk_items = stored.take(np.arange(len(chunks))).columns
        index.object_items = stored.take(np.arange(len(chunks), len(stored))).columns
    return index


def paths_of(planner_data: Any) -> dict[str, tuple[PathElement, ...]] | None:
    """Return planner data as FQN → path, or raise UnsupportedValueError."""
    if planner_data is None:
        return None
    fits = isinstance(planner_data, Mapping)
    for name, path in planner_data.items() if fits else ():
        fits = fits and isinstance(name, str) and isinstance(path, tuple)
        fits = fits and not [part for part in path if not isinstance(part, str | int)]
    if fits:
        return dict(planner_data)
    raise UnsupportedValueError(
        f"planner_data of type {type(planner_data).__qualname__} does not fit into a manifest: it must be None or a "
        "mapping of FQN to a path (a tuple of str and int); keep other planner data in the state dict"
    )


def _put_aliases(index: CheckpointIndex, aliases: Mapping[str, str]) -> None:
    rows = {name: row for row, name in enumerate(index.tensor_names)}
    for alias, target in aliases.items():
        if target not in rows:
            raise PlanError(f"alias {alias!r} points to {target!r}, which is not a tensor of the checkpoint")
    index.alias_names = list(aliases)
    index.alias_targets = np.array([rows[target] for target in aliases.values()], np.uint32)


def _stored_items(keys: Iterable[MetadataIndex], storage_data: Any) -> StoredItems:
    if not isinstance(storage_data, Mapping):
        raise UnsupportedValueError(
            f"storage_data of type {type(storage_data).__qualname__} does not fit into a manifest: it must map "
            "MetadataIndex to StorageInfo"
        )
    return StoredItems.of(_stored(key, storage_data) for key in keys)


def _stored(key: MetadataIndex, storage_data: Mapping[MetadataIndex, Any]) -> StoredItem:
    info = storage_data.get(key)
    if info is None:
        at = "" if key.offset is None else f" at offset {tuple(key.offset)}"
        raise PlanError(f"nothing was stored for {key.fqn!r}{at}: the storage writer returned no result for it")
    if not isinstance(info, StorageInfo):
        raise UnsupportedValueError(
            f"storage_data of {key.fqn!r} is a {type(info).__qualname__}; a manifest needs StorageInfo records"
        )
    return stored_item(info, is_object=key.offset is None)


def written_index(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> CheckpointIndex:
    """Return the index from results in rank order; PlanError if one is missing. Sets `metadata.storage_data`."""
    records = records_of(metadata)
    known = [one for one in map(written_of, results) if one is not None]
    order = None if records is None or len(known) < len(results) else _order_in_index(records, known)
    if records is None or order is None:
        metadata.storage_data = _storage_data(metadata, results)
        index = index_from_metadata(metadata, aliases=metadata.aliases)
        metadata.storage_data = metadata_from_index(index).storage_data
        return index
    index = records.index
    parts, chunks = [one.stored for one in known], int(index.tensor_chunks.sum())
    objects, stored = StoredItems.joined(parts, order[chunks:]), StoredItems.joined(parts, order[:chunks])
    written = replace(
        index,
        files=stored.files,
        chains=stored.chains,
        chunk_items=stored.columns,
        object_items=objects.columns,
        paths=paths_of(metadata.planner_data),
    )
    metadata.storage_data = LazyDict(StorageRecords(records, written))
    return written


def planned_rows(
    planned: PlanColumns | PlannedRows, records: StateRecords, known: dict[int, I64] | None = None
) -> PlannedRows | None:
    """Return a final plan as rows of an index, or None. `known` caches rows by the identity of lists of names."""
    index = records.index
    if isinstance(planned, PlannedRows):
        return planned if planned.index is index else None
    if planned.hints is None:
        return None
    try:
        names = planned.table.tensor_names
        tensors = None if known is None else known.get(id(names))
        if tensors is None:
            tensors = np.array([records.tensors[name] for name in names], np.int64)
            if known is not None:
                known[id(names)] = tensors
        objects = np.array([records.objects[name] for name in planned.table.object_names], np.int64)
    except KeyError:
        return None
    chunks = index.chunk_starts()[tensors.repeat(planned.table.tensor_chunks)] + planned.hints
    return PlannedRows(index, chunks, objects, planned.whole, planned.object_bytes)


def _order_in_index(source: StateRecords, written: Sequence[WrittenColumns]) -> npt.NDArray[Any] | None:
    chunks = int(source.index.tensor_chunks.sum())
    total, place = chunks + len(source.index.object_names), 0
    order = np.full(total, total, np.min_scalar_type(total))
    for one in written:
        found = planned_rows(one.planned, source)
        if found is None:
            return None
        for rows in (found.chunks, chunks + found.objects):
            if place + len(rows) > total or (len(rows) and not 0 <= rows.min() <= rows.max() < total):
                return None
            order[rows] = np.arange(place, place + len(rows))
            place += len(rows)
    return None if place < total or (order == total).any() else order


def _storage_data(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> dict[MetadataIndex, Any]:
    places: dict[MetadataIndex, Any] = {}
    for rank_results in results:
        for result in rank_results:
            places[as_index(result.index)] = result.storage_data
    for alias, target in (metadata.aliases or {}).items():
        entry = metadata.state_dict_metadata[target]
        for position, chunk in enumerate(getattr(entry, "chunks", ())):
            place = places[MetadataIndex(target, chunk.offsets, position)]
            places[MetadataIndex(alias, chunk.offsets, position)] = place
    return places
