"""Metadata records of a checkpoint: tensors, chunks, objects, and items' locations in storage.

Names, fields and field order are stock's. `Metadata` pickles as stock's class, other records as classes of this module.

Source: torch 2.13 `torch.distributed.checkpoint.{metadata,filesystem}` (names, fields, pickled states).
"""

from __future__ import annotations

import copy
import copyreg
import io
import os
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType
from typing import Any

import torch

from dcp_base.escaping import printable, printable_bytes
from dcp_core.errors import UnsupportedFormatError
from dcp_core.records.lazy import LazyDict
from dcp_manifest.folders.folder import rank_of_data_file
from dcp_manifest.index.columns import Framing, StoredItem, TensorFlags
from dcp_manifest.index.literal_keys import LiteralKey


class StockEnum(Enum):
    """Enumeration with members equal to stock's."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same_kind = isinstance(other, Enum) and type(other).__name__.lstrip("_") == type(self).__name__.lstrip("_")
        return same_kind and other.name == self.name  # type: ignore[attr-defined] # it is an Enum

    __hash__ = Enum.__hash__  # hashes the name, as stock's members do


class MemoryFormatEncoding(Enum):
    """Numbers for memory formats."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


@dataclass
class ChunkStorageMetadata:
    """A box of a tensor, in elements."""

    offsets: torch.Size
    sizes: torch.Size


class _Strides:
    """Keeps `strides` out of `vars(properties)`, which programs pass to `torch.empty`."""

    __slots__ = ("strides",)


@dataclass
class TensorProperties(_Strides):
    """Properties of a saved tensor; only `dtype` affects loads."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False
    strides: tuple[int, ...] | None = field(default_factory=NoneType, compare=False)
    """Strides in elements, as in torch 2.15; None if unknown. Not stored."""

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Return a tensor's properties, always with `torch.contiguous_format`, as stock does."""
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            memory_format=torch.contiguous_format,
            # `is_pinned` would copy a lazily conjugated or negated tensor.
            pin_memory=tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg()) and tensor.is_pinned(),
            strides=tensor.stride() if tensor.layout is torch.strided else None,
        )

    def __getstate__(self) -> tuple[Any, ...]:
        return (  # without strides: torch before 2.15 cannot read them
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


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype, or raise UnsupportedFormatError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedFormatError(
            f"the checkpoint holds tensors of dtype {name!r}, which torch {torch.__version__} lacks"
        )
    return dtype


def properties_of(dtype: str, flags: int) -> TensorProperties:
    """Return properties from dtype and flags."""
    found = TensorFlags.from_bits(flags)
    return TensorProperties(
        dtype=dtype_of(dtype),
        layout=getattr(torch, found.layout),
        requires_grad=found.requires_grad,
        memory_format=MEMORY_FORMATS[found.memory_format],
        pin_memory=found.pin_memory,
    )


@dataclass
class TensorStorageMetadata:
    """Global shape, properties and stored chunks of one tensor."""

    properties: TensorProperties
    size: torch.Size
    chunks: list[ChunkStorageMetadata]


@dataclass
class BytesStorageMetadata:
    """Marks an object's entry."""


STORAGE_TYPES = TensorStorageMetadata | BytesStorageMetadata


@dataclass
class StorageMeta:
    """Checkpoint, save and load ids that a storage records; None if not recorded.

    Stock ignores `modules`; ours mark that a manifest exists.
    """

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass(frozen=True, init=False)
class MetadataIndex:
    """Key of an item: its FQN, and for tensors the chunk's offset in elements.

    `index` hints at the position among the tensor's chunks; comparisons ignore it.
    """

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(hash=False, compare=False, default=None)

    def __init__(self, fqn: str, offset: Sequence[int] | None = None, index: int | None = None) -> None:
        object.__setattr__(self, "fqn", fqn)
        object.__setattr__(self, "offset", None if offset is None else torch.Size(offset))
        object.__setattr__(self, "index", index)


@dataclass
class StorageInfo:
    """Location of one item in a data file, `relative_path` to the checkpoint; `offset` and `length` in bytes.

    `transform_descriptors` are in decoding order; `stored` is the manifest's record, None for checkpoints by stock.
    """

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None
    stored: StoredItem | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, stored: StoredItem) -> StorageInfo:
        """Return a record's location."""
        return cls(stored.file, stored.offset, stored.length, list(stored.chain) or None, stored)


def stored_item(info: Any, *, is_object: bool) -> StoredItem:
    """Return the manifest's record for a `StorageInfo` or a similar record."""
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
    """Metadata of a checkpoint.

    Args:
        state_dict_metadata: FQN → `TensorStorageMetadata` or `BytesStorageMetadata`.
        planner_data: The planner's data; for `DefaultSavePlanner`, FQN → path in the nested state dict.
        storage_data: The storage's data; with files, `MetadataIndex` → `StorageInfo`.
        version: Version of stock's format.
        aliases: FQN of a tied tensor → FQN that stores its data; `state_dict_metadata` has both. Ignored by
            comparisons.

    A pickle unpickles to stock's class; `dcp_core.records.foreign_records.as_metadata` converts that back.
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
    source = places.source if isinstance(places, LazyDict) else None
    try:
        if source is not None:
            ends: dict[str, int] = source.file_bytes()  # type: ignore[attr-defined] # the only LazySource used here
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
    """Set and return `storage_meta`, with this checkpoint id if it has none."""
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    if metadata.storage_meta.checkpoint_id is None:
        metadata.storage_meta.checkpoint_id = checkpoint_id
    return metadata.storage_meta


class DeferredMetadata(Metadata):
    """Calls `read` at the first access."""

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
        self.version  # noqa: B018 - reads the metadata
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

ClassPath = tuple[str, str]


def dumps_as(
    value: object,
    *,
    paths: Mapping[type, ClassPath],
    states: Mapping[type, Callable[[Any], Any]],
    plain: Collection[type[str]] = (),
    protocol: int | None = None,
) -> bytes:
    """Pickle an object under other class names, without importing those classes.

    `paths`: class → (module, name). `states`: exact class → function that returns an instance's state. Instances of
    `plain` become ordinary strings.
    """
    buffer = io.BytesIO()
    number = pickle.DEFAULT_PROTOCOL if protocol is None else max(2, protocol)
    _RenamingPickler(buffer, paths, states, plain, number).dump(value)
    return buffer.getvalue()


_save_own_global: Callable[..., None] = vars(pickle._Pickler)["save_global"]  # noqa: SLF001


# The C pickler imports each class that it names and checks its identity. Only the Python pickler can write another
# name.
class _RenamingPickler(pickle._Pickler):  # noqa: SLF001
    proto: int
    save: Callable[[object], None]
    write: Callable[[bytes], object]
    memoize: Callable[[object], None]

    def __init__(
        self,
        file: io.BytesIO,
        paths: Mapping[type, ClassPath],
        states: Mapping[type, Callable[[Any], Any]],
        plain: Collection[type[str]],
        protocol: int,
    ) -> None:
        super().__init__(file, protocol)
        self._paths = paths
        self._states = states
        own = vars(pickle._Pickler)["dispatch"]  # noqa: SLF001
        vars(self)["dispatch"] = {**own, **dict.fromkeys(plain, own[str])}

    def reducer_override(self, obj: Any) -> Any:
        state_of = self._states.get(type(obj))
        if state_of is None:
            return NotImplemented
        # typeshed lacks copyreg.__newobj__.
        newobj = vars(copyreg)["__newobj__"]
        return newobj, (type(obj),), state_of(obj)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        path = self._paths.get(obj) if isinstance(obj, type) else None
        if path is None:
            _save_own_global(self, obj, name)
            return
        if self.proto >= 4:
            self.save(path[0])
            self.save(path[1])
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(pickle.GLOBAL + f"{path[0]}\n{path[1]}\n".encode())
        self.memoize(obj)
