"""Metadata records that describe a checkpoint: tensors, their chunks, and where each item is stored.

Names, fields and their order are stock's; planners and storages written for stock work with them. `Metadata` pickles
as stock's own class (a storage writer ported from stock can dump it and stock can read the file); the other records
pickle as themselves. Columns, files and plans live elsewhere.

Source: torch 2.13 `torch.distributed.checkpoint.{metadata,filesystem}` (names, fields, pickled states).
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from dcp_core.records.lazy import LazyDict
from dcp_core.records.stock_pickling import dumps_as
from dcp_manifest.index.items import Framing, StoredItem
from dcp_manifest.index.literal_keys import LiteralKey

__all__ = [
    "MEMORY_FORMATS",
    "STORAGE_TYPES",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "DeferredMetadata",
    "MemoryFormatEncoding",
    "Metadata",
    "MetadataIndex",
    "StorageInfo",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "note_checkpoint_id",
    "stored_item",
]


class MemoryFormatEncoding(Enum):
    """A `torch.memory_format` as a number, because it cannot be pickled."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
"""Memory formats by the numbers of `MemoryFormatEncoding`."""


@dataclass(slots=True)
class ChunkStorageMetadata:
    """A chunk, that is a box of one tensor: start and extent in elements, one number per dimension."""

    offsets: torch.Size
    sizes: torch.Size


@dataclass(slots=True)
class TensorProperties:
    """Properties of a tensor besides its shape. Only `dtype` has an effect; the rest is kept as a note."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False
    strides: tuple[int, ...] | None = field(default=None, compare=False)
    """Strides of the saved tensor, in elements: a note of torch 2.15 that is not stored; None if not known."""

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Return the properties of a tensor; its memory format is always given as contiguous, as stock does."""
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            memory_format=torch.contiguous_format,
            pin_memory=tensor.is_pinned(),
            strides=tensor.stride() if tensor.layout is torch.strided else None,
        )

    def __getstate__(self) -> tuple[Any, ...]:
        return (  # without the strides, which no version before 2.15 reads
            self.dtype,
            self.layout,
            self.requires_grad,
            MemoryFormatEncoding(MEMORY_FORMATS.index(self.memory_format)),
            self.pin_memory,
        )

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, encoding, self.pin_memory, *rest = state
        self.strides = rest[0] if rest else None
        self.memory_format = MEMORY_FORMATS[encoding.value]


@dataclass(slots=True)
class TensorStorageMetadata:
    """Metadata of one tensor: global shape, and the chunks in which it is stored."""

    properties: TensorProperties
    size: torch.Size
    chunks: list[ChunkStorageMetadata]


@dataclass(slots=True)
class BytesStorageMetadata:
    """Metadata of one object, a value that is not a tensor."""


STORAGE_TYPES = TensorStorageMetadata | BytesStorageMetadata


@dataclass(slots=True)
class StorageMeta:
    """Metadata of a storage: its checkpoint, save and load ids."""

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, init=False)
class MetadataIndex:
    """Index of one item: the value's name, and for tensors the offset of the chunk. Both decide on equality.

    Args:
        fqn: Name of the value.
        offset: Start of the chunk in the tensor, in elements, as any sequence of ints; None for objects.
        index: Position of the chunk in the tensor's list of chunks, if known: a hint for look-ups.
    """

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(hash=False, compare=False, default=None)

    def __init__(self, fqn: str, offset: Sequence[int] | None = None, index: int | None = None) -> None:
        object.__setattr__(self, "fqn", fqn)
        object.__setattr__(self, "offset", None if offset is None else torch.Size(offset))
        object.__setattr__(self, "index", index)


@dataclass(slots=True)
class StorageInfo:
    """Location of one item in a byte storage: value of `Metadata.storage_data[index]`.

    Args:
        relative_path: Path of the data file, relative to the checkpoint.
        offset: Start of the item in the file, in bytes.
        length: Length of the item in bytes.
        transform_descriptors: Names of the transforms to undo, in that order; None if there are none.
        stored: Further facts about the item (payload range, CRCs) from this library's own index format.
    """

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None
    stored: StoredItem | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, stored: StoredItem) -> StorageInfo:
        """Return the location of an item of a manifest."""
        return cls(stored.file, stored.offset, stored.length, list(stored.chain) or None, stored)


def stored_item(info: Any, *, is_object: bool) -> StoredItem:
    """Return the manifest's item for a location, which another writer (of torch, or ported from there) may have made.

    Args:
        info: A `StorageInfo`, or a record with its fields.
        is_object: Whether the item is an object, not a chunk of a tensor.
    """
    if isinstance(info, StorageInfo) and info.stored is not None:
        return info.stored
    return StoredItem(
        file=str(info.relative_path),
        offset=int(info.offset),
        length=int(info.length),
        lead=0,
        stored_bytes=int(info.length),
        framing=Framing.OBJECT if is_object else Framing.TORCH_ZIP,
        chain=tuple(getattr(info, "transform_descriptors", None) or ()),
    )


@dataclass
class Metadata:
    """Metadata of a checkpoint: its values, their chunks, and where each item is stored.

    Args:
        state_dict_metadata: FQN → record of the tensor or object.
        planner_data: Data of the planner; for the default planner FQN → path in the nested state dict.
        storage_data: Data of the storage; for byte storages `MetadataIndex` → `StorageInfo`.
        storage_meta: Metadata of the storage.
        version: Version of stock's format.
        aliases: Name of each tied tensor → name under which its data is stored. Both names have entries. Stock does not
            know this field, and comparisons ignore it.

    Pickled metadata unpickles to the classes of `torch.distributed.checkpoint`; unpickling therefore imports that
    package and does not return this class (`dcp_core.records.foreign_records.as_metadata` converts the result to it).
    """

    state_dict_metadata: dict[str, STORAGE_TYPES]
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: StorageMeta | None = None
    version: str | None = None
    aliases: dict[str, str] | None = field(default=None, compare=False)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        data = dumps_as(self, paths=_STOCK_PATHS, states=_STOCK_STATES, plain=(LiteralKey,), protocol=int(protocol))
        return pickle.loads, (data,)

    def __copy__(self) -> Metadata:
        fields = vars(self)
        twin = object.__new__(type(self))
        vars(twin).update(fields)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Metadata:
        fields = vars(self)
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(fields, memo))
        return twin


def note_checkpoint_id(metadata: Metadata, checkpoint_id: str | os.PathLike[str] | None) -> StorageMeta:
    """Record the checkpoint id that a reader was given in `Metadata.storage_meta`, unless the checkpoint names one.

    Checkpoints of this library never name one, because they may be moved. Stock's file format names the folder in which
    the checkpoint was saved.

    Returns:
        The record `storage_meta`, which is created if there is none.
    """
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    if metadata.storage_meta.checkpoint_id is None:
        metadata.storage_meta.checkpoint_id = checkpoint_id
    return metadata.storage_meta


class DeferredMetadata(Metadata):
    """A `Metadata` that is read on first access; afterwards an ordinary `Metadata`.

    Args:
        read: Function that reads and returns the metadata.
    """

    def __init__(self, read: Callable[[], Metadata]) -> None:
        object.__setattr__(self, "_read", read)

    def __getattribute__(self, name: str) -> Any:
        if object.__getattribute__(self, "__class__") is DeferredMetadata:
            fields = object.__getattribute__(self, "__dict__")
            found = vars(fields["_read"]())
            fields.clear()
            fields.update(found)
            object.__setattr__(self, "__class__", Metadata)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.version  # noqa: B018 - makes it an ordinary one
        object.__setattr__(self, name, value)


_STOCK = "torch.distributed.checkpoint.metadata"
_STOCK_PATHS: dict[type, tuple[str, str]] = {
    BytesStorageMetadata: (_STOCK, "BytesStorageMetadata"),
    ChunkStorageMetadata: (_STOCK, "ChunkStorageMetadata"),
    MemoryFormatEncoding: (_STOCK, "_MEM_FORMAT_ENCODING"),
    Metadata: (_STOCK, "Metadata"),
    MetadataIndex: (_STOCK, "MetadataIndex"),
    StorageInfo: ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    StorageMeta: (_STOCK, "StorageMeta"),
    TensorProperties: (_STOCK, "TensorProperties"),
    TensorStorageMetadata: (_STOCK, "TensorStorageMetadata"),
}


def _fields(*names: str) -> Callable[[Any], dict[str, Any]]:
    return lambda record: {name: _plain(getattr(record, name)) for name in names}


def _plain(value: Any) -> Any:
    """Return a lazy dict as an ordinary one: stock's readers know no other."""
    return dict(value.items()) if isinstance(value, LazyDict) else value


def _set_fields(*names: str) -> Callable[[Any], dict[str, Any]]:
    return lambda record: {name: value for name in names if (value := getattr(record, name)) is not None}


def _index_state(index: MetadataIndex) -> dict[str, Any]:
    state: dict[str, Any] = {"fqn": index.fqn, "index": index.index}
    if index.offset is not None:
        state["offset"] = index.offset
    return state


_STOCK_STATES: dict[type, Callable[[Any], Any]] = {
    BytesStorageMetadata: lambda _: None,
    ChunkStorageMetadata: _fields("offsets", "sizes"),
    Metadata: _fields("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    MetadataIndex: _index_state,
    StorageInfo: _set_fields("relative_path", "offset", "length", "transform_descriptors"),
    StorageMeta: _fields("checkpoint_id", "save_id", "load_id", "modules"),
    TensorProperties: TensorProperties.__getstate__,
    TensorStorageMetadata: _fields("properties", "size", "chunks"),
}
