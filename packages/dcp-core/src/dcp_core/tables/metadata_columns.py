"""Conversion of `Metadata` records into the columns of an index (`dcp_manifest.CheckpointIndex`), and back.

A storage writer publishes the result of `index_from_metadata`, and a storage reader returns `metadata_from_index`.
Records of an index are created on access: a load of one tensor from a large checkpoint creates only its records.
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
    """Return the metadata of a checkpoint, whose records are created from the columns of an index on access.

    Args:
        index: Index of the checkpoint; must not be changed afterwards.
        rank: Rank whose own tensors and objects are included, in place of those of the whole job with the same FQN;
            None for no rank.

    Returns:
        Metadata in stock's form: aliases are entries of their own with the same storage locations as their tensors.
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
    """Return the index of a checkpoint as columns, from its metadata records.

    Args:
        metadata: Metadata, whose `storage_data` maps each item to a `StorageInfo`, or is None before items are written.
        info: Information for the manifest about the whole checkpoint.
        aliases: Alias → FQN under which the tensor's data is stored. An alias needs no entry in `metadata`.

    Returns:
        A new index; tensors, chunks and objects in the order of `metadata`.

    Raises:
        PlanError: An item has no storage location, or an alias refers to no tensor.
        UnsupportedValueError: `planner_data` or `storage_data` has a form that cannot be stored in a manifest.
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
    """Return a planner's data as paths for a manifest: FQN → path in the nested state dict; None for no data.

    Raises:
        UnsupportedValueError: The planner data has another form.
    """
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
