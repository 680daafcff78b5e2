"""Conversion of `Metadata` records to the columns of `dcp_manifest`, and back.

A byte storage publishes the result of `index_from_metadata`, and passes that of `metadata_from_index` to planners.
Records of an index are built lazily, so that reading one tensor of a large checkpoint makes one tensor's records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_core.errors import PlanError, UnsupportedValueError
from dcp_core.records.lazy import LazyDict
from dcp_core.records.metadata import (
    MEMORY_FORMATS,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_core.tables.records_of_index import StateRecords, StorageRecords, dtype_of
from dcp_manifest.index.columns import CheckpointIndex, ItemColumns, ManifestInfo, PathElement, TensorFlags
from dcp_manifest.index.items import Framing, StoredItem
from dcp_manifest.index.stored_items import StoredItems
from dcp_manifest.stock.stock_class_paths import STOCK_VERSION

__all__ = [
    "dtype_name",
    "dtype_of",
    "flag_bits",
    "index_from_metadata",
    "metadata_from_index",
    "paths_of",
]

_MODULES = ["dcp-manifest/1"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in manifests: `torch.float32` → `float32`."""
    return str(dtype).removeprefix("torch.")


def metadata_from_index(index: CheckpointIndex, *, rank: int | None = None) -> Metadata:
    """Return the records of a checkpoint, built when they are looked up.

    Args:
        index: The columns; must not be changed afterwards.
        rank: Include the values that belong to this rank alone; they hide values of the whole job of the same name.

    Returns:
        Metadata in stock's form: aliases are entries of their own that share their target's storage.
    """
    records = StateRecords(index, None if rank is None else rank + 1)
    return Metadata(
        state_dict_metadata=LazyDict(records),
        planner_data=None if index.paths is None else dict(index.paths),
        storage_data=None
        if index.chunk_items is None and index.object_items is None
        else LazyDict(StorageRecords(records)),
        storage_meta=None if index.info is None else StorageMeta(save_id=index.info.save_id, modules=list(_MODULES)),
        version=STOCK_VERSION,
        aliases={
            name: index.tensor_names[row]
            for name, row in zip(index.alias_names, index.alias_targets.tolist(), strict=True)
        }
        or None,
    )


def index_from_metadata(
    metadata: Metadata,
    *,
    info: ManifestInfo | None = None,
    aliases: Mapping[str, str] | None = None,
) -> CheckpointIndex:
    """Return the columns of `metadata`.

    Args:
        metadata: `storage_data` maps each item to a `StorageInfo`, or is None while nothing is stored.
        info: Facts for the manifest about the checkpoint as a whole.
        aliases: Alias → FQN of the tensor that holds its data. An alias needs no entry in `metadata`.

    Returns:
        A new index; tensors, chunks and objects in the order of `metadata`.

    Raises:
        PlanError: An item is not stored, or an alias names no tensor.
        UnsupportedValueError: `planner_data` or `storage_data` is not of the form that a manifest can hold.
    """
    aliases = aliases or {}
    tensors = [
        (name, record)
        for name, record in metadata.state_dict_metadata.items()
        if isinstance(record, TensorStorageMetadata) and name not in aliases
    ]
    objects = [
        name
        for name, record in metadata.state_dict_metadata.items()
        if not isinstance(record, TensorStorageMetadata) and name not in aliases
    ]
    tables = _Tables({}, {}, {})
    index = CheckpointIndex(info=info, object_names=objects, paths=paths_of(metadata.planner_data))
    index.object_owner = np.zeros(len(objects), np.uint32)
    _put_tensors(index, tensors, tables)
    _put_aliases(index, aliases)
    if metadata.storage_data is not None:
        chunk_keys = (MetadataIndex(name, chunk.offsets) for name, record in tensors for chunk in record.chunks)
        index.chunk_items = _item_columns(chunk_keys, metadata.storage_data, tables, Framing.TORCH_ZIP)
        object_keys = (MetadataIndex(name) for name in objects)
        index.object_items = _item_columns(object_keys, metadata.storage_data, tables, Framing.OBJECT)
    index.dtypes, index.files, index.chains = tuple(tables.dtypes), tuple(tables.files), tuple(tables.chains)
    return index


class _Tables(NamedTuple):
    """Lookup of positions in the index's tables, by value."""

    dtypes: dict[str, int]
    files: dict[str, int]
    chains: dict[tuple[str, ...], int]


def paths_of(planner_data: Any) -> dict[str, tuple[PathElement, ...]] | None:
    """Return planner data in a manifest's form. Raises UnsupportedValueError if it has no such form."""
    if planner_data is None:
        return None
    if isinstance(planner_data, Mapping) and all(
        isinstance(name, str) and isinstance(path, tuple) and all(isinstance(part, str | int) for part in path)
        for name, path in planner_data.items()
    ):
        return dict(planner_data)
    raise UnsupportedValueError(
        f"planner_data of type {type(planner_data).__qualname__} does not fit into a manifest: it must be None or a "
        "mapping of FQN to a path (a tuple of str and int); keep other planner data in the state dict"
    )


def _put_tensors(index: CheckpointIndex, tensors: list[tuple[str, TensorStorageMetadata]], tables: _Tables) -> None:
    count = len(tensors)
    records = [record for _, record in tensors]
    chunks: list[ChunkStorageMetadata] = [chunk for record in records for chunk in record.chunks]
    index.tensor_names = [name for name, _ in tensors]
    index.tensor_owner = np.zeros(count, np.uint32)
    dtypes = [tables.dtypes.setdefault(dtype_name(record.properties.dtype), len(tables.dtypes)) for record in records]
    index.tensor_dtype = np.array(dtypes, np.uint8)
    index.tensor_flags = np.array([flag_bits(record.properties) for record in records], np.uint8)
    index.tensor_ndim = np.array([len(record.size) for record in records], np.uint8)
    index.tensor_shape = _flat(record.size for record in records)
    index.tensor_chunks = np.array([len(record.chunks) for record in records], np.int64)
    index.chunk_offsets = _flat(chunk.offsets for chunk in chunks)
    index.chunk_sizes = _flat(chunk.sizes for chunk in chunks)


def _flat(boxes: Iterable[Sequence[int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromiter((number for box in boxes for number in box), np.int64)


def flag_bits(properties: TensorProperties) -> int:
    """Return the properties of a tensor besides its dtype, as the flag bits of manifests."""
    if properties.layout is torch.strided and properties.memory_format is torch.contiguous_format:
        return properties.requires_grad | properties.pin_memory << 1
    return TensorFlags(
        requires_grad=properties.requires_grad,
        pin_memory=properties.pin_memory,
        memory_format=MEMORY_FORMATS.index(properties.memory_format),
        layout=str(properties.layout).removeprefix("torch."),
    ).to_bits()


def _put_aliases(index: CheckpointIndex, aliases: Mapping[str, str]) -> None:
    rows = {name: row for row, name in enumerate(index.tensor_names)}
    for alias, target in aliases.items():
        if target not in rows:
            raise PlanError(f"alias {alias!r} points to {target!r}, which is no tensor of the checkpoint")
    index.alias_names = list(aliases)
    index.alias_targets = np.array([rows[target] for target in aliases.values()], np.uint32)


def _item_columns(keys: Iterable[MetadataIndex], storage_data: Any, tables: _Tables, framing: Framing) -> ItemColumns:
    if not isinstance(storage_data, Mapping):
        raise UnsupportedValueError(
            f"storage_data of type {type(storage_data).__qualname__} does not fit into a manifest: it must map "
            "MetadataIndex to StorageInfo"
        )
    items = StoredItems.of(_stored(key, storage_data, framing) for key in keys)
    files, chains = tables.files, tables.chains
    file_rows = np.array([files.setdefault(name, len(files)) for name in items.files] or [0], np.uint32)
    chain_rows = np.array([0, *(chains.setdefault(links, len(chains)) + 1 for links in items.chains)], np.uint8)
    return replace(items.columns, file=file_rows[items.columns.file], chain=chain_rows[items.columns.chain])


def _stored(key: MetadataIndex, storage_data: Mapping[MetadataIndex, Any], framing: Framing) -> StoredItem:
    info = storage_data.get(key)
    if info is None:
        at = "" if key.offset is None else f" at offset {tuple(key.offset)}"
        raise PlanError(f"nothing was stored for {key.fqn!r}{at}: the storage writer returned no result for it")
    if not isinstance(info, StorageInfo):
        raise UnsupportedValueError(
            f"storage_data of {key.fqn!r} is a {type(info).__qualname__}; a manifest needs StorageInfo records"
        )
    if info.stored is not None:
        return info.stored
    return StoredItem(
        file=info.relative_path,
        offset=info.offset,
        length=info.length,
        lead=0,
        stored_bytes=info.length,
        framing=framing,
        chain=tuple(info.transform_descriptors or ()),
    )
