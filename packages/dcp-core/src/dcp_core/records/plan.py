"""Records of plans: write and read items, and the save plan or load plan of one rank.

Class names, fields and their order are those of stock. Not in this module: planning.

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
    """Kind of a write item: a whole tensor, a shard of a tensor, or a serialized object."""

    TENSOR = 1
    SHARD = 2
    BYTE_IO = 3


class LoadItemType(Enum):
    """Kind of a read item: a box of a tensor, or a serialized object."""

    TENSOR = 1
    BYTE_IO = 2


@dataclass(frozen=True, slots=True)
class BytesIOWriteData:
    """Size in bytes of a serialized object in a write item, if the planner knows the size."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorWriteData:
    """Chunk that a write item of a tensor writes, and properties and global shape (`size`) of the tensor."""

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size


@dataclass(frozen=True, slots=True)
class WriteItem:
    """Write item: one write request of a rank, for an object or for a chunk of a tensor."""

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None

    def tensor_storage_size(self) -> int | None:
        """Return the size in bytes of the global tensor, not only of the chunk, as in stock; None for objects."""
        if self.tensor_data is None:
            return None
        return math.prod(self.tensor_data.size) * self.tensor_data.properties.dtype.itemsize

    def chunk_bytes(self) -> int:
        """Return the size in bytes of the chunk or object that this item writes; 0 for objects of unknown size."""
        if self.tensor_data is None:
            return 0 if self.bytes_io_data is None else self.bytes_io_data.nbytes
        return math.prod(self.tensor_data.chunk.sizes) * self.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ReadItem:
    """Read item: one read request of a rank, for an object or for a box of a stored chunk.

    `storage_index` names the stored chunk or object, `dest_index` the shard or object in the template. The box has
    `lengths` elements; it starts at `storage_offsets` in the stored chunk and at `dest_offsets` in the shard.
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: torch.Size
    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size


@runtime_checkable
class NamedItems(Protocol):
    """Contract of a collection of write items that can return the items' FQNs without creating the items."""

    def names(self) -> set[str]:
        """Return the FQNs of the write items."""
        ...


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Save plan of one rank: the items that the rank writes.

    `usable` is False for a plan that means "use the plan of the last save", as in stock. `aliases` maps the FQN of a
    tied tensor to the FQN under which its data is written. `digests` maps FQNs of small replicated tensors and objects
    to checksums, which the coordinator compares between ranks. `splittable` is True if the planner can resolve any part
    of a tensor's box, so that ranks that hold the same box may each write a part.
    """

    items: list[WriteItem]
    storage_data: Any = None
    planner_data: Any = None
    usable: bool = True
    aliases: dict[str, str] | None = None
    digests: dict[str, int] | None = None
    splittable: bool = False

    def names(self) -> set[str]:
        """Return the FQNs of all items in the plan."""
        source = self.items.source if isinstance(self.items, LazyList) else None
        return source.names() if isinstance(source, NamedItems) else {item.index.fqn for item in self.items}


@dataclass(slots=True)
class LoadPlan:
    """Load plan of one rank: the items that the rank reads."""

    items: list[ReadItem]
    storage_data: Any = None
    planner_data: Any = None
