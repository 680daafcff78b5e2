"""The index that a save publishes: the planned index, completed by the write results of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.records.metadata import Metadata, MetadataIndex
from dcp_core.records.protocols import WriteResult
from dcp_core.tables.metadata_columns import index_from_metadata, paths_of
from dcp_core.tables.plan_columns import PlanColumns, WrittenColumns, written_of
from dcp_core.tables.planned_rows import PlannedRows, rows_of
from dcp_core.tables.records_of_index import StateRecords, records_of
from dcp_manifest.index.columns import CheckpointIndex
from dcp_manifest.index.stored_items import StoredItems

__all__ = ["index_with_items", "written_index"]

I64 = npt.NDArray[np.int64]


def written_index(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> CheckpointIndex:
    """Return the index to publish, from the metadata of the global plan and the write results of all ranks.

    Args:
        metadata: Metadata of the global plan; its `storage_data` is set if a planner or storage has changed it.
        results: Write results of each rank, in rank order.

    Raises:
        PlanError: There is no write result for an item.
        UnsupportedValueError: `planner_data` has a form that cannot be stored in a manifest.
    """
    index = index_with_items(metadata, results)
    if index is None:
        metadata.storage_data = _storage_data(metadata, results)
        index = index_from_metadata(metadata, aliases=metadata.aliases)
    return index


def index_with_items(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> CheckpointIndex | None:
    """Return the index to publish if metadata and write results are columns; None if they are records.

    Args:
        metadata: Metadata from `plan_columns`; a planner may have changed its `planner_data`.
        results: Write results of each rank, in rank order.

    Raises:
        UnsupportedValueError: `planner_data` has a form that cannot be stored in a manifest.
    """
    records = records_of(metadata)
    written = [written_of(result) for result in results]
    known = [one for one in written if one is not None]
    if records is None or len(known) < len(results):
        return None
    index = records.index
    rows = _rows_in_index(records, known)
    if rows is None:
        return None
    stored = StoredItems.joined([one.stored for one in known])
    order = np.argsort(rows, kind="stable")
    chunks = int(index.tensor_chunks.sum())
    return replace(
        index,
        files=stored.files,
        chains=stored.chains,
        chunk_items=stored.take(order[:chunks]).columns,
        object_items=stored.take(order[chunks:]).columns,
        paths=paths_of(metadata.planner_data),
    )


def _rows_in_index(source: StateRecords, written: Sequence[WrittenColumns]) -> I64 | None:
    """Return the row of each written item: chunks first, then objects; None unless each row occurs once."""
    index, chunks = source.index, int(source.index.tensor_chunks.sum())
    parts = []
    for one in written:
        planned = one.planned
        if isinstance(planned, PlannedRows):
            found = (planned.chunks, planned.objects) if planned.index is index else None
        else:
            found = rows_of(planned, source) if isinstance(planned, PlanColumns) else None
        if found is None:
            return None
        parts += [found[0], chunks + found[1]]
    rows = np.concatenate([np.zeros(0, np.int64), *parts])
    return rows if np.array_equal(np.sort(rows), np.arange(chunks + len(index.object_names))) else None


def _storage_data(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> dict[MetadataIndex, Any]:
    """Return the location of every item, aliases included."""
    places: dict[MetadataIndex, Any] = {}
    for rank_results in results:
        for result in rank_results:
            places[result.index] = result.storage_data
    for alias, target in (metadata.aliases or {}).items():
        entry = metadata.state_dict_metadata[target]
        for position, chunk in enumerate(getattr(entry, "chunks", ())):
            place = places[MetadataIndex(target, chunk.offsets, position)]
            places[MetadataIndex(alias, chunk.offsets, position)] = place
    return places
