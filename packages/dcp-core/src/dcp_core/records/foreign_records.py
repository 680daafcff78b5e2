"""Convert stock's metadata and plan items by attribute, without importing stock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dcp_core.records.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_core.records.protocols import BytesIOWriteData, TensorWriteData, WriteItem, WriteItemType


def as_metadata(metadata: Any) -> Metadata:
    """Return stock's metadata as ours; unknown `storage_data` stays."""
    if isinstance(metadata, Metadata):
        return metadata
    stored = metadata.storage_data
    if isinstance(stored, Mapping):
        stored = {_index_or_same(key): _storage_info_or_same(value) for key, value in stored.items()}
    return Metadata(
        state_dict_metadata={name: _entry(record) for name, record in metadata.state_dict_metadata.items()},
        planner_data=metadata.planner_data,
        storage_data=stored,
        storage_meta=_storage_meta(getattr(metadata, "storage_meta", None)),
        version=getattr(metadata, "version", None),
    )


def as_index(index: Any) -> MetadataIndex:
    """Return stock's index as ours."""
    if type(index) is MetadataIndex:
        return index
    return MetadataIndex(index.fqn, index.offset, index.index)


def as_chunk(chunk: Any) -> ChunkStorageMetadata:
    """Return stock's chunk as ours."""
    if type(chunk) is ChunkStorageMetadata:
        return chunk
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


def as_properties(properties: Any) -> TensorProperties:
    """Return stock's or a `ShardedTensor`'s properties as ours."""
    if type(properties) is TensorProperties:
        return properties
    return TensorProperties(
        dtype=properties.dtype,
        layout=properties.layout,
        requires_grad=properties.requires_grad,
        memory_format=properties.memory_format,
        pin_memory=properties.pin_memory,
    )


def as_write_item(item: Any) -> WriteItem:
    """Return stock's write item as ours."""
    if type(item) is WriteItem:
        return item
    tensor, data = item.tensor_data, getattr(item, "bytes_io_data", None)  # missing in older versions
    return WriteItem(
        index=as_index(item.index),
        type=WriteItemType[item.type.name],
        bytes_io_data=None if data is None else BytesIOWriteData(data.nbytes),
        tensor_data=None
        if tensor is None
        else TensorWriteData(as_chunk(tensor.chunk), as_properties(tensor.properties), torch.Size(tensor.size)),
    )


def _entry(record: Any) -> STORAGE_TYPES:
    if not hasattr(record, "chunks"):
        return BytesStorageMetadata()
    return TensorStorageMetadata(
        as_properties(record.properties), torch.Size(record.size), [as_chunk(chunk) for chunk in record.chunks]
    )


def _index_or_same(key: Any) -> Any:
    return as_index(key) if all(hasattr(key, name) for name in ("fqn", "offset", "index")) else key


def _storage_info_or_same(value: Any) -> Any:
    if isinstance(value, StorageInfo) or not all(
        hasattr(value, name) for name in ("relative_path", "offset", "length")
    ):
        return value
    descriptors = getattr(value, "transform_descriptors", None)
    return StorageInfo(value.relative_path, value.offset, value.length, descriptors)


def _storage_meta(meta: Any) -> StorageMeta | None:
    if meta is None or isinstance(meta, StorageMeta):
        return meta
    return StorageMeta(meta.checkpoint_id, meta.save_id, meta.load_id, list(getattr(meta, "modules", ())))
