"""Fast path of loads: read requests for whole tensors, directly into the template's memory, for many small tensors.

Applies to plans and planners that read unsharded tensors unchanged; all other items are handled in `storage_reader`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from dcp_core.records.lazy import LazyDict
from dcp_core.records.metadata import Metadata
from dcp_core.records.plan import LoadPlan, ReadItem
from dcp_core.records.protocols import LoadPlanner
from dcp_core.tables.load_columns import read_columns_of
from dcp_core.tables.records_of_index import StorageRecords
from dcp_io.requests import ReadRequest
from dcp_manifest.index.items import Framing, ItemKind, StoredItem

__all__ = ["split_whole_reads"]

Memory = Callable[[torch.Tensor, torch.dtype], memoryview | None]

_NO_CRCS = np.zeros(0, np.uint32)
_RAW = int(ItemKind.RAW)


def split_whole_reads(
    plan: LoadPlan, planner: LoadPlanner, metadata: Metadata, memory_of: Memory
) -> tuple[list[ReadRequest], list[ReadItem]]:
    """Return read requests for tensors that are read whole into contiguous memory, and the other items of the plan.

    Args:
        plan: Load plan of this rank.
        planner: Load planner, which provides the tensors to fill.
        metadata: Metadata of the checkpoint, with the locations of the items.
        memory_of: Function that returns the memory of a tensor as bytes if stored elements of a dtype can be read
            directly into it, otherwise None.
    """
    columns = read_columns_of(plan.items)
    places = metadata.storage_data
    untouched = isinstance(places, LazyDict) and isinstance(places.source, StorageRecords) and not places.touched
    targets = _plain_targets(planner)
    if columns is None or not untouched or targets is None:
        return [], plan.items
    records, stored = columns.records, columns.records.index.chunk_items
    if stored is None:
        return [], plan.items
    rows = np.array([records.tensors[name] for name in columns.names], np.int64)
    chunks = np.array(records.chunk_starts, np.int64)[rows]
    borders = stored.running_counts()
    first = np.cumsum(borders) - borders
    table = zip(
        columns.names,
        records.index.tensor_dtype[rows].tolist(),
        *(
            column[chunks].tolist()
            for column in (
                *(stored.file, stored.offset, stored.length, stored.lead, stored.stored_bytes),
                *(stored.kinds(), stored.checked, stored.crc32, first, borders),
            )
        ),
        strict=True,
    )
    requests: list[ReadRequest] = []
    filled: list[torch.Tensor] = []
    others: list[ReadItem] = []
    files, dtypes = records.index.files, records.dtypes
    for name, dtype, file, offset, length, lead, size, kind, checked, crc, start, count in table:
        known, target = dtypes[dtype], targets[name]
        if target.requires_grad or type(target) is not torch.Tensor:
            target = target.detach()
        into = None if kind != _RAW or known is None else memory_of(target, known)
        if into is None or len(into) != size:
            others.append(columns.whole(name))
            continue
        running = stored.running_crcs[start : start + count] if count else _NO_CRCS
        item = StoredItem(
            files[file], offset, length, lead, size, Framing.RAW, crc if checked else None, running if checked else None
        )
        requests.append(ReadRequest(name, item, 0, len(into), into))
        filled.append(target)
    increment_version(filled)  # memory is filled without torch: autograd must not take old values for these
    return requests, others + columns.others


def _plain_targets(planner: LoadPlanner) -> dict[str, Any] | None:
    # Looked up on the class: a planner that wraps another one and forwards missing attributes decides for itself.
    plain_targets = getattr(type(planner), "plain_targets", None)
    return None if plain_targets is None else plain_targets(planner)
