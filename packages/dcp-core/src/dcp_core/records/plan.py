"""Plans of saves and loads as records: the items of one rank, and the plan that holds them.

Names, fields and their order are stock's. The planners decide on them.

Source: torch 2.13 `torch.distributed.checkpoint.planner`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch

from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

__all__ = [
    "BytesIOWriteData",
    "LoadItemType",
    "LoadPlan",
    "ReadItem",
    "SavePlan",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]


class WriteItemType(Enum):
    """Kind of a save's item: a whole tensor, a shard of one, or an object's bytes."""

    TENSOR = 1
    SHARD = 2
    BYTE_IO = 3


class LoadItemType(Enum):
    """Kind of a load's item: a box of a tensor, or an object's bytes."""

    TENSOR = 1
    BYTE_IO = 2


@dataclass(frozen=True, slots=True)
class BytesIOWriteData:
    """Size of an object's bytes, where the planner knows it beforehand."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorWriteData:
    """The box that a tensor item writes, and the tensor that it belongs to (`size` is the global shape)."""

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One write request of a rank: a chunk or an object."""

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None

    def tensor_storage_size(self) -> int | None:
        """Return the size of the *global* tensor in bytes, as stock has it; None for objects."""
        if self.tensor_data is None:
            return None
        return math.prod(self.tensor_data.size) * self.tensor_data.properties.dtype.itemsize

    def chunk_bytes(self) -> int:
        """Return the size of this item itself in bytes; 0 for objects of unknown size."""
        if self.tensor_data is None:
            return 0 if self.bytes_io_data is None else self.bytes_io_data.nbytes
        return math.prod(self.tensor_data.chunk.sizes) * self.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One read request of a rank: the box of `lengths` elements at `storage_offsets` of a stored chunk.

    `dest_index` names the value of the template and the shard of it; `dest_offsets` and `storage_offsets` count from
    the start of that shard and of that chunk.
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: torch.Size
    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size


@runtime_checkable
class NamedItems(Protocol):
    """Items whose names are known without making the items."""

    def names(self) -> set[str]:
        """Return their FQNs."""
        ...


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The items that one rank writes.

    `usable` is False for a plan that means "use the plan of the last save". `aliases` maps the FQN of a tied value to
    the FQN under which its data is written; `digests` maps FQNs of small replicated values to a checksum of their
    content, by which the coordinator sees whether ranks agree on them. `splittable` says that the planner can resolve
    any part of a tensor's box, so that ranks that hold the same box may write parts of it.
    """

    items: list[WriteItem]
    storage_data: Any = None
    planner_data: Any = None
    usable: bool = True
    aliases: dict[str, str] | None = None
    digests: dict[str, int] | None = None
    splittable: bool = False

    def names(self) -> set[str]:
        """Return the FQNs of the items."""
        source = self.items.source if isinstance(self.items, LazyList) else None
        return source.names() if isinstance(source, NamedItems) else {item.index.fqn for item in self.items}


@dataclass(slots=True)
class LoadPlan:
    """The items that one rank reads."""

    items: list[ReadItem]
    storage_data: Any = None
    planner_data: Any = None
