"""Conversion of `Metadata` records to the columns of `dcp_manifest`, and back.

A byte storage publishes the result of `index_from_metadata`, and passes the result of `metadata_from_index` to
planners. Records of an index are built lazily, so that reading one tensor of a large checkpoint makes one tensor's
records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dcp_core.errors import PlanError, UnsupportedValueError
from dcp_core.records.lazy import LazyDict
from dcp_core.records.metadata import (
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorStorageMetadata,
    stored_item,
)
from dcp_core.tables.column_builder import ColumnBuilder
from dcp_core.tables.records_of_index import StateRecords, StorageRecords
from dcp_manifest.index.columns import CheckpointIndex, ManifestInfo, PathElement
from dcp_manifest.index.items import StoredItem
from dcp_manifest.index.stored_items import StoredItems
from dcp_manifest.stock.stock_class_paths import STOCK_VERSION

__all__ = [
    "index_from_metadata",
    "metadata_from_index",
    "paths_of",
]

_MODULES = ["dcp-manifest/1"]


def metadata_from_index(index: CheckpointIndex, *, rank: int | None = None) -> Metadata:
    """Return the records of a checkpoint, built when they are looked up.

    Args:
        index: Index with the columns; must not be changed afterwards.
        rank: Rank whose own values are included; they hide values of the whole job with the same name.

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
        metadata: Metadata, whose `storage_data` maps each item to a `StorageInfo`, or is None while nothing is stored.
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
    table = ColumnBuilder()
    for name, record in tensors:
        table.add(name, record.properties, record.size, record.chunks, whole=False)
    index = table.columns(objects).index
    index.info, index.paths = info, paths_of(metadata.planner_data)
    _put_aliases(index, aliases)
    if metadata.storage_data is not None:
        chunks = [MetadataIndex(name, chunk.offsets) for name, record in tensors for chunk in record.chunks]
        stored = _stored_items([*chunks, *map(MetadataIndex, objects)], metadata.storage_data)
        index.files, index.chains = stored.files, stored.chains
        index.chunk_items = stored.take(np.arange(len(chunks))).columns
        index.object_items = stored.take(np.arange(len(chunks), len(stored))).columns
    return index


def paths_of(planner_data: Any) -> dict[str, tuple[PathElement, ...]] | None:
    """Return planner data in a manifest's form. Raises UnsupportedValueError if that is not possible."""
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


def _put_aliases(index: CheckpointIndex, aliases: Mapping[str, str]) -> None:
    rows = {name: row for row, name in enumerate(index.tensor_names)}
    for alias, target in aliases.items():
        if target not in rows:
            raise PlanError(f"alias {alias!r} points to {target!r}, which is no tensor of the checkpoint")
    index.alias_names = list(aliases)
    index.alias_targets = np.array([rows[target] for target in aliases.values()], np.uint32)


def _stored_items(keys: Iterable[MetadataIndex], storage_data: Any) -> StoredItems:
    if not isinstance(storage_data, Mapping):
        raise UnsupportedValueError(
            f"storage_data of type {type(storage_data).__qualname__} does not fit into a manifest: it must map "
            "MetadataIndex to StorageInfo"
        )
    return StoredItems.of(_stored(key, storage_data) for key in keys)


def _stored(key: MetadataIndex, storage_data: Mapping[MetadataIndex, Any]) -> StoredItem:
    info = storage_data.get(key)
    if info is None:
        at = "" if key.offset is None else f" at offset {tuple(key.offset)}"
        raise PlanError(f"nothing was stored for {key.fqn!r}{at}: the storage writer returned no result for it")
    if not isinstance(info, StorageInfo):
        raise UnsupportedValueError(
            f"storage_data of {key.fqn!r} is a {type(info).__qualname__}; a manifest needs StorageInfo records"
        )
    return stored_item(info, is_object=key.offset is None)
