"""Conversion of our records to stock's. Fields that stock lacks travel in a subclass of its plan, or are left out.

Source: torch 2.6 and 2.13 `torch.distributed.checkpoint.{metadata,planner,storage,filesystem}` (fields).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner, storage

from dcp_bridge.converted import converted
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

__all__ = [
    "ExtendedSavePlan",
    "stock_load_plan",
    "stock_metadata",
    "stock_read_item",
    "stock_result",
    "stock_save_plan",
    "stock_storage_meta",
    "stock_write_item",
]


T = TypeVar("T")

_SIZES_OF_OBJECTS = hasattr(planner, "BytesIOWriteData")  # older versions plan without them


@dataclass(frozen=True)
class ExtendedSavePlan(planner.SavePlan):
    """Stock's save plan with the fields that only our plan, or a later stock, has; `dataclasses.replace` keeps them."""

    usable: bool = True
    aliases: dict[str, str] | None = None
    digests: dict[str, int] | None = None
    splittable: bool = False


def stock_save_plan(plan: SavePlan) -> planner.SavePlan:
    """Convert our save plan to stock's; items are converted on first access."""
    return ExtendedSavePlan(
        items=converted(plan.items, stock_write_item),
        storage_data=plan.storage_data,
        planner_data=plan.planner_data,
        usable=plan.usable,
        aliases=plan.aliases,
        digests=plan.digests,
        splittable=plan.splittable,
    )


def stock_load_plan(plan: LoadPlan) -> planner.LoadPlan:
    """Convert our load plan to stock's; items are converted on first access."""
    return planner.LoadPlan(
        items=converted(plan.items, stock_read_item),
        storage_data=plan.storage_data,
        planner_data=plan.planner_data,
    )


def stock_write_item(item: WriteItem) -> planner.WriteItem:
    """Convert our write item to stock's."""
    tensor, data = item.tensor_data, item.bytes_io_data
    return _record(
        planner.WriteItem,
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
    """Convert our read item to stock's."""
    return planner.ReadItem(
        type=planner.LoadItemType[item.type.name],
        dest_index=stock_index(item.dest_index),
        dest_offsets=item.dest_offsets,
        storage_index=stock_index(item.storage_index),
        storage_offsets=item.storage_offsets,
        lengths=item.lengths,
    )


def stock_result(result: WriteResult) -> storage.WriteResult:
    """Convert our write result to stock's."""
    return storage.WriteResult(stock_index(result.index), result.size_in_bytes, result.storage_data)


def stock_index(index: MetadataIndex) -> metadata.MetadataIndex:
    """Convert our metadata index to stock's."""
    return metadata.MetadataIndex(index.fqn, index.offset, index.index)


def stock_metadata(own: Metadata) -> metadata.Metadata:
    """Convert our metadata to stock's, every record of it. Aliases (tied values) become entries of their own."""
    stored = own.storage_data
    if isinstance(stored, Mapping):
        stored = {_index_or_same(key): _info_or_same(value) for key, value in stored.items()}
    return _record(
        metadata.Metadata,
        state_dict_metadata={name: _entry(record) for name, record in own.state_dict_metadata.items()},
        planner_data=own.planner_data,
        storage_data=stored,
        storage_meta=stock_storage_meta(own.storage_meta),
        version=own.version,
    )


def stock_storage_meta(meta: StorageMeta | None) -> metadata.StorageMeta | None:
    """Convert our storage metadata to stock's."""
    if meta is None:
        return None
    return _record(
        metadata.StorageMeta,
        checkpoint_id=meta.checkpoint_id,
        save_id=meta.save_id,
        load_id=meta.load_id,
        modules=list(meta.modules),
    )


def _entry(record: Any) -> metadata.TensorStorageMetadata | metadata.BytesStorageMetadata:
    if not isinstance(record, TensorStorageMetadata):
        return metadata.BytesStorageMetadata()
    return metadata.TensorStorageMetadata(
        properties=_properties(record.properties), size=record.size, chunks=[_chunk(one) for one in record.chunks]
    )


def _chunk(chunk: ChunkStorageMetadata) -> metadata.ChunkStorageMetadata:
    return metadata.ChunkStorageMetadata(offsets=chunk.offsets, sizes=chunk.sizes)


def _properties(properties: TensorProperties) -> metadata.TensorProperties:
    return metadata.TensorProperties(
        dtype=properties.dtype,
        layout=properties.layout,
        requires_grad=properties.requires_grad,
        memory_format=properties.memory_format,
        pin_memory=properties.pin_memory,
    )


def _index_or_same(key: Any) -> Any:
    return stock_index(key) if isinstance(key, MetadataIndex) else key


def _info_or_same(value: Any) -> Any:
    if not isinstance(value, StorageInfo):
        return value
    return _record(
        filesystem._StorageInfo,  # noqa: SLF001 - what every reader of stock's files expects here
        relative_path=value.relative_path,
        offset=value.offset,
        length=value.length,
        transform_descriptors=value.transform_descriptors,
    )


def _record(kind: Callable[..., T], **values: Any) -> T:
    """Make a record from the values that this version of stock has fields for; older ones have fewer."""
    known = _field_names(kind)
    return kind(**{name: value for name, value in values.items() if name in known})


@cache
def _field_names(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))
