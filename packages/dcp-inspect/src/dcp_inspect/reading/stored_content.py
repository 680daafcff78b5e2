"""Content of a checkpoint without torch, read on demand, with the attributes of `dcp_format.Content`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dcp_io import ReadRequest, Store
from dcp_io.reading.read_engine import read_items
from dcp_manifest import CheckpointIndex, CorruptCheckpointError, StoredChunk, StoredItem, StoredTensor, stored_tensors
from dcp_manifest.index.boxes import coverage_problems
from dcp_manifest.index.columns import ItemKind
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.index.stored_tensors import stored_objects

# dcp-format reads larger single rows, because it can split rows.
_MAX_ROW_BYTES = 256 << 20
OpenContent = Callable[[], Any]


@runtime_checkable
class SupportsRows(Protocol):
    """Bytes of a tensor that can be read by rows."""

    def rows(self, start: int, stop: int) -> memoryview:
        """Read rows [start, stop)."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: torch's dtype name, shape in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any
    """Has `nbytes`, `pieces(max_bytes)`; perhaps `SupportsRows`."""


@dataclass(frozen=True, slots=True)
class StoredContent:
    """Values of a checkpoint; only the index is in memory."""

    url: str
    tensors: dict[str, TensorEntry]
    objects: dict[str, Callable[[], bytes]]
    """Name → function that returns verified bytes of `torch.save`."""
    aliases: dict[str, str]
    close: Callable[[], None]

    @property
    def nbytes(self) -> int:
        """Size of all tensors; tied tensors count once."""
        return sum(entry.data.nbytes for entry in self.tensors.values())


def stored_content(store: Store, index: CheckpointIndex, open_other: OpenContent) -> StoredContent:
    """Return a content; `open_other` opens it by dcp-format."""
    problems = coverage_problems(index)
    if problems:
        name, sentence = problems[0]
        raise CorruptCheckpointError(f"{sentence}; the checkpoint in {store.url} is incomplete", key=name)
    opened: list[Any] = []

    def other() -> Any:
        if not opened:
            opened.append(open_other())
        return opened[0]

    def close() -> None:
        for content in opened:
            content.close()

    return StoredContent(
        url=store.url,
        tensors={one.name: _entry(store, one, other) for one in stored_tensors(index)},
        objects={name: _object(store, name, item, other) for name, item in stored_objects(index)},
        aliases={
            name: index.tensor_names[row]
            for name, row in zip(index.alias_names, index.alias_targets.tolist(), strict=True)
        },
        close=close,
    )


def read_object(store: Store, name: str, item: StoredItem) -> bytes:
    """Read an object's verified bytes."""
    return read_objects(store, {name: item})[name]


def read_objects(store: Store, items: Mapping[str, StoredItem]) -> dict[str, bytes]:
    """Read objects' verified bytes with few requests."""
    found: dict[str, bytes] = {}

    def keep(name: str) -> Callable[[memoryview], None]:
        def done(data: memoryview) -> None:
            found[name] = bytes(data)

        return done

    read_items(store, [ReadRequest(name, item, 0, item.stored_bytes, None, keep(name)) for name, item in items.items()])
    return found


def _object(store: Store, name: str, item: StoredItem, other: OpenContent) -> Callable[[], bytes]:
    if item.kind is ItemKind.ARCHIVE:
        return functools.partial(read_object, store, name, item)

    def read() -> bytes:
        data: bytes = other().objects[name]()
        return data

    return read


def _entry(store: Store, tensor: StoredTensor, other: OpenContent) -> TensorEntry:
    item_bytes = ITEM_BYTES.get(tensor.dtype, 0)
    rows = _Rows(store, tensor, item_bytes)
    plain = all(map(_is_plain, tensor.chunks)) and item_bytes and rows.row_bytes <= _MAX_ROW_BYTES
    data: Any = rows if plain else _Elsewhere(rows.nbytes, lambda: other().tensors[tensor.name].data)
    return TensorEntry(tensor.name, tensor.dtype, tensor.shape, data)


def _is_plain(chunk: StoredChunk) -> bool:
    """Whether a chunk's stored bytes are its values and can be verified in parts."""
    return chunk.item.kind is ItemKind.RAW and not chunk.item.has_one_crc


class _Elsewhere:
    def __init__(self, nbytes: int, find: Callable[[], Any]) -> None:
        self.nbytes = nbytes
        self._find = find

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        yield from self._find().pieces(max_bytes)

    def rows(self, start: int, stop: int) -> Any:
        return self._find().rows(start, stop)


class _Rows:
    def __init__(self, store: Store, tensor: StoredTensor, item_bytes: int) -> None:
        self._store = store
        self._tensor = tensor
        self._shape = tensor.shape or (1,)
        self._item_bytes = item_bytes
        self.row_bytes = math.prod(self._shape[1:]) * item_bytes
        self.nbytes = self._shape[0] * self.row_bytes

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        step = max(1, max_bytes // max(1, self.row_bytes))
        for start in range(0, self._shape[0] if self.nbytes else 0, step):
            yield self.rows(start, min(self._shape[0], start + step))

    def rows(self, start: int, stop: int) -> memoryview:
        """Read rows [start, stop), and others only in their CRC blocks."""
        slab = np.empty((stop - start, *self._shape[1:], self._item_bytes), np.uint8)
        parts: list[tuple[tuple[slice, ...], npt.NDArray[np.uint8]]] = []
        requests = []
        for chunk in self._tensor.chunks if slab.size else ():
            offsets, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
            first, last = max(start, offsets[0]), min(stop, offsets[0] + sizes[0])
            if first >= last or not math.prod(sizes):
                continue
            row_bytes = math.prod(sizes[1:]) * self._item_bytes
            part = np.empty((last - first, *sizes[1:], self._item_bytes), np.uint8)
            inner = (slice(at, at + size) for at, size in zip(offsets[1:], sizes[1:], strict=True))
            parts.append(((slice(first - start, last - start), *inner), part))
            begin, end = (first - offsets[0]) * row_bytes, (last - offsets[0]) * row_bytes
            requests.append(ReadRequest(chunk.name, chunk.item, begin, end, part.reshape(-1).data))
        read_items(self._store, requests)
        for place, part in parts:
            slab[place] = part
        return slab.reshape(-1).data
