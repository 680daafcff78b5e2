"""Content of a checkpoint without torch, read on demand, with the attributes of `dcp_format.Content`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dcp_io import Store
from dcp_io.reading.stored_reader import StoredReader
from dcp_manifest import CheckpointIndex, CorruptCheckpointError, StoredItem, StoredTensor, stored_tensors
from dcp_manifest.index.boxes import coverage_problems
from dcp_manifest.index.columns import ItemKind
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.index.stored_tensors import stored_objects

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

    reader = StoredReader(store)
    return StoredContent(
        url=store.url,
        tensors={one.name: _entry(reader, one, other) for one in stored_tensors(index)},
        objects={name: _object(reader, name, item, other) for name, item in stored_objects(index)},
        aliases={
            name: index.tensor_names[row]
            for name, row in zip(index.alias_names, index.alias_targets.tolist(), strict=True)
        },
        close=close,
    )


def _object(reader: StoredReader, name: str, item: StoredItem, other: OpenContent) -> Callable[[], bytes]:
    def read() -> bytes:
        data: bytes = other().objects[name]()
        return data

    return read if item.kind is not ItemKind.ARCHIVE else lambda: bytes(reader.whole({name: item})[name])


def _entry(reader: StoredReader, tensor: StoredTensor, other: OpenContent) -> TensorEntry:
    if tensor.dtype in ITEM_BYTES and all(chunk.item.kind is ItemKind.RAW for chunk in tensor.chunks):
        data: Any = reader.tensor(tensor.dtype, tensor.shape, tensor.chunks)
    else:
        nbytes = math.prod(tensor.shape) * ITEM_BYTES.get(tensor.dtype, 0)
        data = _Elsewhere(nbytes, lambda: other().tensors[tensor.name].data)
    return TensorEntry(tensor.name, tensor.dtype, tensor.shape, data)


class _Elsewhere:
    def __init__(self, nbytes: int, find: Callable[[], Any]) -> None:
        self.nbytes = nbytes
        self._find = find

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        yield from self._find().pieces(max_bytes)

    def rows(self, start: int, stop: int) -> Any:
        return self._find().rows(start, stop)
