"""Conversion of stock's records to ours. Single records that `dcp_core.records.foreign_records` knows are left to it.

Source: torch 2.13 `torch.distributed.checkpoint.{planner,storage}` (fields).
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import planner, storage

from dcp_bridge.converted import converted
from dcp_core import LoadItemType, LoadPlan, ReadItem, SavePlan, StorageMeta, WriteResult
from dcp_core.toolkit import as_index, as_write_item

__all__ = ["own_load_plan", "own_read_item", "own_result", "own_save_plan", "own_storage_meta"]


def own_save_plan(plan: planner.SavePlan) -> SavePlan:
    """Convert stock's save plan to ours; unread lists return the items that they were made from."""
    return SavePlan(
        items=converted(plan.items, as_write_item),
        storage_data=plan.storage_data,
        planner_data=plan.planner_data,
        usable=getattr(plan, "usable", True),
        aliases=getattr(plan, "aliases", None),
        digests=getattr(plan, "digests", None),
        splittable=getattr(plan, "splittable", False),
    )


def own_load_plan(plan: planner.LoadPlan) -> LoadPlan:
    """Convert stock's load plan to ours; unread lists return the items that they were made from."""
    return LoadPlan(
        items=converted(plan.items, own_read_item),
        storage_data=plan.storage_data,
        planner_data=plan.planner_data,
    )


def own_read_item(item: Any) -> ReadItem:
    """Convert stock's read item to ours."""
    return ReadItem(
        type=LoadItemType[item.type.name],
        dest_index=as_index(item.dest_index),
        dest_offsets=item.dest_offsets,
        storage_index=as_index(item.storage_index),
        storage_offsets=item.storage_offsets,
        lengths=item.lengths,
    )


def own_result(result: storage.WriteResult) -> WriteResult:
    """Convert stock's write result to ours; the storage's own data in it stays as it is."""
    return WriteResult(as_index(result.index), result.size_in_bytes, result.storage_data)


def own_storage_meta(meta: Any) -> StorageMeta | None:
    """Convert stock's storage metadata to ours."""
    if meta is None:
        return None
    return StorageMeta(meta.checkpoint_id, meta.save_id, meta.load_id, list(getattr(meta, "modules", ())))
