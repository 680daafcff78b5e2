"""Compact form of a rank's final plan, which the coordinator caches: row numbers in the index of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dcp_core.records.plan import WriteItem
from dcp_core.tables.plan_columns import PlanColumns, tensor_facts
from dcp_core.tables.records_of_index import StateRecords
from dcp_manifest.index.box_columns import ranges, starts
from dcp_manifest.index.columns import CheckpointIndex

__all__ = ["PlannedRows", "rows_of"]

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PlannedRows:
    """The items of one rank's final plan, as row numbers in the index; records of items are created on access."""

    index: CheckpointIndex
    """Index of the whole checkpoint, without storage locations."""
    chunks: I64
    """Rows of the rank's chunks in the index: tensor by tensor, in the rank's order."""
    objects: I64
    whole: U8
    """For each of the rank's tensors, 1 if it is an ordinary, unsharded tensor, otherwise 0."""
    object_bytes: I64

    @classmethod
    def of(cls, planned: PlanColumns, records: StateRecords) -> PlannedRows | None:
        """Return the compact form of a final plan; None if some of its items are not in the index of `records`."""
        rows = rows_of(planned, records)
        return None if rows is None else cls(records.index, *rows, planned.whole, planned.object_bytes)

    def __len__(self) -> int:
        return len(self.chunks) + len(self.objects)

    def __iter__(self) -> Iterator[WriteItem]:
        return iter(self.columns())

    def names(self) -> set[str]:
        """Return the FQNs of the plan's items."""
        return self.columns().names()

    def columns(self) -> PlanColumns:
        """Return the plan's items as columns, equal to those from which the compact form was made."""
        index = self.index
        tensor = np.repeat(np.arange(len(index.tensor_chunks)), index.tensor_chunks)
        own = tensor[self.chunks]
        begins = np.flatnonzero(np.concatenate([np.ones(min(1, len(own)), bool), own[1:] != own[:-1]]))
        tensors = own[begins]
        boxes = starts(index.tensor_ndim[tensor])
        numbers = ranges(boxes[:-1][self.chunks], boxes[1:][self.chunks])
        taken = replace(
            tensor_facts(index, tensors),
            tensor_chunks=np.diff(np.append(begins, len(own))),
            chunk_offsets=index.chunk_offsets[numbers],
            chunk_sizes=index.chunk_sizes[numbers],
            object_names=[index.object_names[row] for row in self.objects.tolist()],
            object_owner=index.object_owner[self.objects],
            alias_names=[],
            alias_targets=np.zeros(0, np.uint32),
        )
        hints = self.chunks - index.chunk_starts()[:-1][own]
        return PlanColumns(taken, self.whole, self.object_bytes, hints=hints)


def rows_of(planned: PlanColumns, records: StateRecords) -> tuple[I64, I64] | None:
    """Return the row numbers that the items of a plan have in the index of `records`.

    Returns:
        Rows of the chunks, and rows of the objects, in the order of the plan; None if some items are not in the index.
    """
    if planned.hints is None:
        return None
    try:
        tensors = np.array([records.tensors[name] for name in planned.index.tensor_names], np.int64)
        objects = np.array([records.objects[name] for name in planned.index.object_names], np.int64)
    except KeyError:
        return None
    return records.index.chunk_starts()[np.repeat(tensors, planned.index.tensor_chunks)] + planned.hints, objects
