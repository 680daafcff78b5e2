"""Convert stock's plans, results and items to our classes; see also `dcp_core.records.foreign_records`.

Source: torch 2.13 `torch.distributed.checkpoint.{planner,storage}` (fields).
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import planner, storage

from dcp_bridge.converted import converted
from dcp_bridge.record_like import record_like
from dcp_core import LoadItemType, LoadPlan, ReadItem, SavePlan, StorageMeta, WriteResult
from dcp_core.records.foreign_records import as_index, as_write_item


def own_save_plan(plan: planner.SavePlan) -> SavePlan:
    """Convert stock's save plan."""
    return record_like(SavePlan, plan, items=converted(plan.items, as_write_item))


def own_load_plan(plan: planner.LoadPlan) -> LoadPlan:
    """Convert stock's load plan."""
    return record_like(LoadPlan, plan, items=converted(plan.items, own_read_item))


def own_read_item(item: Any) -> ReadItem:
    """Convert stock's read item."""
    return record_like(
        ReadItem,
        item,
        type=LoadItemType[item.type.name],
        dest_index=as_index(item.dest_index),
        storage_index=as_index(item.storage_index),
    )


def own_result(result: storage.WriteResult) -> WriteResult:
    """Convert stock's write result, but not its `storage_data`."""
    return WriteResult(as_index(result.index), result.size_in_bytes, result.storage_data)


def own_storage_meta(meta: Any) -> StorageMeta | None:
    """Convert stock's storage metadata."""
    return None if meta is None else record_like(StorageMeta, meta, modules=list(getattr(meta, "modules", ())))
