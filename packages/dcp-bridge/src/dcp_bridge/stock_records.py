"""Convert our plans, metadata and results to stock's classes; fields that stock's lack are dropped.

Source: torch 2.6 and 2.13 `torch.distributed.checkpoint.{metadata,planner,storage,filesystem}` (fields).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner, storage

from dcp_bridge.converted import converted
from dcp_bridge.record_like import record_like
from dcp_core import (
    ChunkStorageMetadata,
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    SavePlan,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    WriteItem,
    WriteResult,
)

_SIZES_OF_OBJECTS = hasattr(planner, "BytesIOWriteData")  # missing in older versions


@dataclass(frozen=True)
class ExtendedSavePlan(planner.SavePlan):
    """Stock's save plan with our fields, which `dataclasses.replace` keeps."""

    usable: bool = True
    aliases: dict[str, str] | None = None
    digests: dict[Any, int] | None = None
    splittable: bool = False


def stock_save_plan(plan: SavePlan) -> planner.SavePlan:
    """Convert our save plan."""
    return record_like(ExtendedSavePlan, plan, items=converted(plan.items, stock_write_item))


def stock_load_plan(plan: LoadPlan) -> planner.LoadPlan:
    """Convert our load plan."""
    return record_like(planner.LoadPlan, plan, items=converted(plan.items, stock_read_item))


def stock_write_item(item: WriteItem) -> planner.WriteItem:
    """Convert our write item."""
    tensor, data = item.tensor_data, item.bytes_io_data
    return record_like(
        planner.WriteItem,
        item,
        index=stock_index(item.index),
        type=planner.WriteItemType[item.type.name],
        bytes_io_data=None if data is None or not _SIZES_OF_OBJECTS else planner.BytesIOWriteData(nbytes=data.nbytes),
        tensor_data=None
        if tensor is None
        else planner.TensorWriteData(
            chunk=_chunk(tensor.chunk), properties=_properties(tensor.properties), size=torch.Size(tensor.size)
        ),
    )


def stock_read_item(item: ReadItem) -> planner.ReadItem:
    """Convert our read item."""
    return record_like(
        planner.ReadItem,
        item,
        type=planner.LoadItemType[item.type.name],
        dest_index=stock_index(item.dest_index),
        storage_index=stock_index(item.storage_index),
    )


def stock_result(result: WriteResult) -> storage.WriteResult:
    """Convert our write result."""
    return record_like(storage.WriteResult, result, index=stock_index(result.index))


def stock_index(index: MetadataIndex) -> metadata.MetadataIndex:
    """Convert our `MetadataIndex`."""
    return metadata.MetadataIndex(index.fqn, index.offset, index.index)


def stock_metadata(own: Metadata) -> metadata.Metadata:
    """Convert our metadata and its records; aliases become entries."""
    stored = own.storage_data
    if isinstance(stored, Mapping):
        stored = {_index_or_same(key): _info_or_same(value) for key, value in stored.items()}
    return record_like(
        metadata.Metadata,
        own,
        state_dict_metadata={name: _entry(record) for name, record in own.state_dict_metadata.items()},
        storage_data=stored,
        storage_meta=stock_storage_meta(own.storage_meta),
    )


def stock_storage_meta(meta: StorageMeta | None) -> metadata.StorageMeta | None:
    """Convert our storage metadata."""
    return None if meta is None else record_like(metadata.StorageMeta, meta, modules=list(meta.modules))


def _entry(record: Any) -> metadata.TensorStorageMetadata | metadata.BytesStorageMetadata:
    if not isinstance(record, TensorStorageMetadata):
        return metadata.BytesStorageMetadata()
    return metadata.TensorStorageMetadata(
        properties=_properties(record.properties), size=record.size, chunks=[_chunk(one) for one in record.chunks]
    )


def _chunk(chunk: ChunkStorageMetadata) -> metadata.ChunkStorageMetadata:
    return metadata.ChunkStorageMetadata(offsets=chunk.offsets, sizes=chunk.sizes)


def _properties(properties: TensorProperties) -> metadata.TensorProperties:
    return record_like(metadata.TensorProperties, properties)


def _index_or_same(key: Any) -> Any:
    return stock_index(key) if isinstance(key, MetadataIndex) else key


def _info_or_same(value: Any) -> Any:
    if not isinstance(value, StorageInfo):
        return value
    return record_like(filesystem._StorageInfo, value)  # noqa: SLF001 - readers of stock's files expect this class
