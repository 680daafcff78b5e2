"""`columns_of`: converts the write items of any planner's save plan into columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dcp_core.errors import PlanError
from dcp_core.records.lazy import LazyList
from dcp_core.records.plan import TensorWriteData, WriteItem, WriteItemType
from dcp_core.tables.column_builder import ColumnBuilder
from dcp_core.tables.plan_columns import PlanColumns
from dcp_core.tables.planned_rows import PlannedRows

__all__ = ["columns_of"]


def columns_of(items: Sequence[WriteItem]) -> PlanColumns:
    """Return the write items of a save plan as columns.

    Args:
        items: Items of the plan: a `LazyList` over columns, whose columns are returned, or `WriteItem` records.

    Raises:
        PlanError: Records contradict each other, or are incomplete; the message names the FQN.
    """
    source = items.source if isinstance(items, LazyList) else None
    if isinstance(source, PlanColumns):
        return source
    if isinstance(source, PlannedRows):
        return source.columns()
    # A lazy list that is walked becomes an ordinary one.
    return _of_records(items if source is None else source)


def _of_records(items: Iterable[WriteItem]) -> PlanColumns:
    tensors: dict[str, list[tuple[WriteItem, TensorWriteData]]] = {}
    objects: dict[str, int] = {}
    order: dict[str, None] = {}
    for item in items:
        fqn, data = item.index.fqn, item.tensor_data
        order[fqn] = None
        if item.type is WriteItemType.BYTE_IO:
            objects[fqn] = -1 if item.bytes_io_data is None else item.bytes_io_data.nbytes
        elif data is None:
            raise PlanError(f"the plan's tensor item {fqn!r} has no tensor_data; a planner must fill it in")
        else:
            tensors.setdefault(fqn, []).append((item, data))
    table = ColumnBuilder()
    hints: list[int | None] = []
    for fqn, boxes in tensors.items():
        if fqn in objects:
            raise PlanError(f"{fqn!r} is planned twice, once as an object; give the values different names")
        first = boxes[0][1]
        for _, data in boxes:
            _check_box(fqn, first, data)
        whole = all(item.type is WriteItemType.TENSOR for item, _ in boxes)
        table.add(fqn, first.properties, first.size, [data.chunk for _, data in boxes], whole=whole)
        hints += [item.index.index for item, _ in boxes]
    columns = table.columns([*objects], [*objects.values()])
    columns.order = tuple(order)
    known = [hint for hint in hints if hint is not None]
    if len(known) == len(hints):
        columns.hints = np.array(known, np.int64)
    return columns


def _check_box(fqn: str, first: TensorWriteData, data: TensorWriteData) -> None:
    if first.size != data.size or first.properties.dtype != data.properties.dtype:
        raise PlanError(
            f"shards of {fqn!r} do not belong together: {first.properties.dtype} {tuple(first.size)} and "
            f"{data.properties.dtype} {tuple(data.size)}"
        )
    if not len(data.chunk.offsets) == len(data.chunk.sizes) == len(data.size):
        raise PlanError(
            f"{fqn!r} of shape {tuple(data.size)} is planned with offsets {tuple(data.chunk.offsets)} and sizes "
            f"{tuple(data.chunk.sizes)}, which are not of as many dimensions"
        )
