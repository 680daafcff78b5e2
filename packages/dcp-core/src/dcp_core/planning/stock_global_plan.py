"""Stock's global save plan for custom planners that call it, and a check of coverage.

Source: torch 2.13 `default_planner.create_default_global_save_plan`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dcp_core.errors import PlanError
from dcp_core.records.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from dcp_core.records.protocols import SavePlan, WriteItem, WriteItemType
from dcp_manifest.index.boxes import box_text, find_hole, find_overlap, out_of_bounds
from dcp_manifest.stock.stock_write import STOCK_VERSION

_SHOWN_PROBLEMS = 20


def create_default_global_save_plan(
    all_plans: list[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """Return the plans, with positions among chunks as index hints, and the metadata.

    No item may be in two plans. PlanError: ranks disagree about a name.
    """
    entries: dict[str, STORAGE_TYPES] = {}
    new_plans = [
        replace(plan, items=[_add_item(entries, item, rewrite=rewrite_index_hints) for item in plan.items])
        for plan in all_plans
    ]
    return new_plans, Metadata(entries, version=STOCK_VERSION)


def _add_item(entries: dict[str, STORAGE_TYPES], item: WriteItem, *, rewrite: bool) -> WriteItem:
    fqn = item.index.fqn
    entry = entries.get(fqn)
    if item.type == WriteItemType.BYTE_IO:
        if entry is not None:
            raise PlanError(f"{fqn!r} is planned twice, once as an object; give the values different names")
        entries[fqn] = BytesStorageMetadata()
        return item
    data = item.tensor_data
    if data is None:
        raise PlanError(f"the plan's tensor item {fqn!r} has no tensor_data; a planner must fill it in")
    if entry is None:
        entry = entries[fqn] = TensorStorageMetadata(data.properties, data.size, [])
    if not isinstance(entry, TensorStorageMetadata):
        raise PlanError(f"{fqn!r} is an object on one rank and a tensor on another; give them different names")
    if entry.size != data.size or entry.properties.dtype != data.properties.dtype:
        raise PlanError(
            f"shards of {fqn!r} do not belong together: {entry.properties.dtype} {tuple(entry.size)} and "
            f"{data.properties.dtype} {tuple(data.size)}"
        )
    entry.chunks.append(data.chunk)
    if not rewrite:
        return item
    return replace(item, index=MetadataIndex(fqn, item.index.offset, len(entry.chunks) - 1))


def check_coverage(entries: dict[str, STORAGE_TYPES], *, complete: bool) -> None:
    """Raise PlanError unless chunks lie inside tensors, do not overlap and, if `complete`, fill them."""
    problems: list[str] = []
    for fqn, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata) and (problem := _coverage_problem(entry, complete=complete)):
            problems.append(f"{fqn!r} of shape {tuple(entry.size)}: {problem}")
    if problems:
        more = f"\n  … and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
        raise PlanError(
            "the ranks' shards do not make up whole tensors:\n  " + "\n  ".join(problems[:_SHOWN_PROBLEMS]) + more
        )


def _coverage_problem(entry: TensorStorageMetadata, *, complete: bool) -> str | None:
    boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    for offsets, sizes in boxes:
        if out_of_bounds(entry.size, offsets, sizes):
            return f"a rank holds {box_text(offsets, sizes)}, which is beyond the tensor"
    pair = find_overlap(boxes)
    if pair is not None:
        return f"ranks hold {' and '.join(box_text(*boxes[row]) for row in pair)}, which overlap"
    if complete and sum(math.prod(sizes) for _, sizes in boxes) != math.prod(entry.size):
        hole = find_hole(((0,) * len(entry.size), entry.size), boxes)
        return None if hole is None else f"no rank holds {box_text(*hole)}"
    return None
