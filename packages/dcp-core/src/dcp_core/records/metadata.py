"""Metadata records of a checkpoint: tensors, their chunks, objects, and the location of each item in storage.

Class names, fields and their order are those of stock, so planners and storages written for stock accept these records.
`Metadata` is pickled as stock's class of that name, so stock can read a file that contains the pickle; the other
records are pickled as classes of this module. Not in this module: columns, files and plans.

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
from dcp_manifest.folders.file_names import rank_of_data_file
from dcp_manifest.index.items import Framing, StoredItem
from dcp_manifest.index.literal_keys import LiteralKey
from dcp_manifest.printable import printable, printable_bytes

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
    """Numbers for memory formats, because a `torch.memory_format` cannot be pickled."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
"""The `torch.memory_format` for each number of `MemoryFormatEncoding`."""


@dataclass(slots=True)
class ChunkStorageMetadata:
    """A chunk, a box of one tensor: offsets and sizes in elements, one number per dimension."""

    offsets: torch.Size
    sizes: torch.Size


@dataclass(slots=True)
class TensorProperties:
    """Properties of a saved tensor besides its shape. Only `dtype` affects loads; the others are for information."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False
    strides: tuple[int, ...] | None = field(default=None, compare=False)
    """Strides of the saved tensor in elements, as in torch 2.15; not stored in the checkpoint; None if not known."""

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Return the properties of a tensor; as in stock, the memory format is always `torch.contiguous_format`."""
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
    """Ids that a storage records.

    Attributes:
        checkpoint_id: Id of the checkpoint; None if not recorded.
        save_id: Random name of the save; None if not recorded.
        load_id: Random name of the load, which a storage reader sets; None in a save.
        modules: List that stock ignores; in checkpoints of this library, it has the marker that a manifest exists.
    """

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, init=False)
class MetadataIndex:
    """Key of one item in a checkpoint: FQN, and for tensors the offset of the chunk.

    Keys with the same FQN and offset are equal; `index` does not matter.

    Args:
        fqn: FQN of the tensor or object.
        offset: Start of the chunk in the tensor, in elements, as any sequence of ints; None for objects.
        index: Position of the chunk in the tensor's list of chunks, as a hint for look-ups; None if not known.
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
    """Location of one item in a data file; `Metadata.storage_data` maps each `MetadataIndex` to a `StorageInfo`.

    Args:
        relative_path: Path of the data file, relative to the checkpoint.
        offset: Start of the item in the file, in bytes.
        length: Length of the item in bytes.
        transform_descriptors: Descriptors of the item's transforms, in the order in which they decode; None without
            transforms.
        stored: Record of the item in the manifest, with payload range and CRCs; None for checkpoints by stock.
    """

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None
    stored: StoredItem | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, stored: StoredItem) -> StorageInfo:
        """Return the `StorageInfo` for the record of an item in a manifest."""
        return cls(stored.file, stored.offset, stored.length, list(stored.chain) or None, stored)


def stored_item(info: Any, *, is_object: bool) -> StoredItem:
    """Return the manifest's record of an item for its location.

    Args:
        info: Location as a `StorageInfo`, or as a record with the same fields from another storage writer.
        is_object: Whether the item is an object instead of a chunk of a tensor.
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


@dataclass(repr=False)
class Metadata:
    """Metadata of a checkpoint: its tensors and objects, their chunks, and the location of each item.

    Args:
        state_dict_metadata: FQN → `TensorStorageMetadata` or `BytesStorageMetadata`.
        planner_data: Data of the save planner; for `DefaultSavePlanner`, FQN → path in the nested state dict.
        storage_data: Data of the storage; for storages with data files, `MetadataIndex` → `StorageInfo`.
        storage_meta: Ids that the storage has recorded.
        version: Version of stock's format.
        aliases: FQN of each tied tensor → FQN under which its data is stored; `state_dict_metadata` has both. Stock's
            class has no such field, and comparisons ignore it.

    Its `repr` is a summary in one line; the fields hold everything.

    A pickle of a `Metadata` unpickles to stock's class `torch.distributed.checkpoint.metadata.Metadata`, which
    `dcp_core.records.foreign_records.as_metadata` converts back.
    """

    state_dict_metadata: dict[str, STORAGE_TYPES]
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: StorageMeta | None = None
    version: str | None = None
    aliases: dict[str, str] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        place = None if self.storage_meta is None else self.storage_meta.checkpoint_id
        values = _counted(len(self.state_dict_metadata), "value")
        stored = _summary(self.storage_data) if isinstance(self.storage_data, dict) else ""
        return printable(f"<Metadata{'' if place is None else f' of {place}'}: {values}{stored}>")

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


def _summary(places: dict[Any, Any]) -> str:
    """Return what is stored, in words; nothing for locations that are not those of a byte storage."""
    source = places.source if isinstance(places, LazyDict) else None
    try:
        if source is not None:
            ends: dict[str, int] = source.file_bytes()  # type: ignore[attr-defined] # the one source that there is
        else:
            ends = {}
            for each in places.values():
                ends[each.relative_path] = max(ends.get(each.relative_path, 0), each.offset + each.length)
    except AttributeError:
        return ""
    ranks = {rank_of_data_file(name) for name in ends} - {None}
    by = f", by {_counted(len(ranks), 'rank')}" if ranks else ""
    return f", {printable_bytes(sum(ends.values()))} in {_counted(len(ends), 'data file')}{by}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def note_checkpoint_id(metadata: Metadata, checkpoint_id: str | os.PathLike[str] | None) -> StorageMeta:
    """Set the checkpoint id in `Metadata.storage_meta`, unless the checkpoint itself contains a checkpoint id.

    Checkpoints of this library contain no checkpoint id, because they may be moved; those of stock contain the folder
    in which they were saved.

    Args:
        metadata: Metadata to complete.
        checkpoint_id: Checkpoint id from which a reader loads.

    Returns:
        The record `metadata.storage_meta`, which is created if it is None.
    """
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    if metadata.storage_meta.checkpoint_id is None:
        metadata.storage_meta.checkpoint_id = checkpoint_id
    return metadata.storage_meta


class DeferredMetadata(Metadata):
    """A `Metadata` whose fields are read from storage at the first access to one of them.

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

    def __repr__(self) -> str:
        return "<Metadata, to be read from storage when it is first used>"

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
