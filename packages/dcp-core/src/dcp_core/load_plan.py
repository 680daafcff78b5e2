"""The read items of one rank, and everything in which template and checkpoint do not fit.

Source: torch 2.13 `default_planner.create_default_local_load_plan`, `planner_helpers` (contract; stock reports the
first problem only, converts dtypes silently, and does not see missing chunks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_core.boxes import box_text, find_hole, find_overlap, overlaps
from dcp_core.casts import is_lossless_cast
from dcp_core.lazy import LazyList
from dcp_core.load_columns import ReadColumns, WholeTensors, records_of
from dcp_core.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from dcp_core.plan import LoadItemType, ReadItem
from dcp_core.report import LoadProblem, suggest
from dcp_core.shards import LocalTensor, local_tensor

__all__ = ["LocalLoadPlan", "create_read_items_for_chunk_list", "plan_local_load"]


@dataclass(slots=True)
class LocalLoadPlan:
    """What this rank reads, and what it found on the way."""

    items: list[ReadItem] = field(default_factory=list)
    problems: list[LoadProblem] = field(default_factory=list)
    matched: list[str] = field(default_factory=list)
    """Keys that are loaded; also those of which this rank holds no shard."""
    missing: list[str] = field(default_factory=list)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)


def plan_local_load(
    state_dict: dict[str, Any], metadata: Metadata, *, strict: bool, allow_lossy_casts: bool
) -> LocalLoadPlan:
    """Match a flat template against the metadata.

    Args:
        state_dict: FQN → tensor of any kind, or object.
        metadata: Of the checkpoint.
        strict: Whether a missing key is a problem.
        allow_lossy_casts: Whether a conversion that loses values is no problem.

    Returns:
        The items, and all problems; nothing is raised for them here.
    """
    planned = LocalLoadPlan()
    records = records_of(metadata)
    columns = None if records is None else ReadColumns(records, [], planned.items)
    whole = None if records is None else WholeTensors(records)
    entries = metadata.state_dict_metadata
    for fqn, value in state_dict.items():
        if columns is not None and whole is not None and whole.match(fqn, value):
            columns.names.append(fqn)
            continue
        entry = entries.get(fqn)
        if entry is None:
            planned.missing.append(fqn)
            if strict:
                near = suggest(fqn, entries.keys() - state_dict.keys())
                _problem(planned, fqn, "missing", f"{fqn!r} is not in the checkpoint{near}")
            continue
        held = local_tensor(fqn, value)
        if isinstance(entry, TensorStorageMetadata):
            _plan_tensor(planned, fqn, value, held, entry, allow_lossy_casts=allow_lossy_casts)
        elif isinstance(entry, BytesStorageMetadata) and held is None:
            index = MetadataIndex(fqn)
            planned.items.append(_object_item(index))
            planned.matched.append(fqn)
        else:
            _problem(planned, fqn, "kind", f"{fqn!r} is a tensor in the template but an object in the checkpoint")
    if columns is not None:
        planned.matched.extend(columns.names)
        planned.items = LazyList(columns)
    return planned


def _problem(planned: LocalLoadPlan, key: str, kind: str, message: str) -> None:
    planned.problems.append(LoadProblem(key, kind, message))


def _object_item(index: MetadataIndex) -> ReadItem:
    nothing = torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)


def _plan_tensor(
    planned: LocalLoadPlan,
    fqn: str,
    value: Any,
    held: LocalTensor | None,
    entry: TensorStorageMetadata,
    *,
    allow_lossy_casts: bool,
) -> None:
    if held is None:
        kind = type(value).__qualname__
        _problem(planned, fqn, "kind", f"{fqn!r} is a {kind} in the template but a tensor in the checkpoint")
        return
    if tuple(held.size) != tuple(entry.size):
        text = f"{fqn!r} has shape {tuple(held.size)} in the template but {tuple(entry.size)} in the checkpoint"
        _problem(planned, fqn, "shape", text)
        return
    stored, wanted = entry.properties.dtype, held.dtype
    if stored != wanted:
        names = (str(stored).removeprefix("torch."), str(wanted).removeprefix("torch."))
        planned.cast[fqn] = names
        if not allow_lossy_casts and not is_lossless_cast(stored, wanted):
            remedy = "pass DefaultLoadPlanner(allow_lossy_casts=True) to convert, or change the template's dtype"
            _problem(planned, fqn, "cast", f"{fqn!r}: {names[0]} → {names[1]} would lose values; {remedy}")
            return
    stored_boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    twice = find_overlap(stored_boxes) if len(stored_boxes) > 1 else None
    if twice is not None:
        one, other = (box_text(*stored_boxes[position]) for position in twice)
        _problem(planned, fqn, "overlap", f"{fqn!r}: the checkpoint stores elements twice, in {one} and in {other}")
        return
    for chunk in held.chunks:
        hole = find_hole((chunk.offsets, chunk.sizes), stored_boxes)
        if hole is not None:
            text = f"{fqn!r}: the checkpoint has no data for {box_text(*hole)} of {tuple(entry.size)}"
            _problem(planned, fqn, "hole", text)
            return
    planned.items.extend(create_read_items_for_chunk_list(fqn, entry, held.chunks))
    planned.matched.append(fqn)


def create_read_items_for_chunk_list(
    fqn: str, checkpoint_md: TensorStorageMetadata, local_chunks: Sequence[ChunkStorageMetadata]
) -> list[ReadItem]:
    """One read item for every stored chunk that overlaps a local one.

    Args:
        fqn: Name of the tensor.
        checkpoint_md: Its record in the checkpoint.
        local_chunks: Boxes of the tensor that this rank wants, in elements.

    Source: torch 2.13 `planner_helpers.create_read_items_for_chunk_list`.
    """
    items: list[ReadItem] = []
    stored_boxes = [(chunk.offsets, chunk.sizes) for chunk in checkpoint_md.chunks]
    for position, local in enumerate(local_chunks):
        for stored_position, offsets, sizes in overlaps((local.offsets, local.sizes), stored_boxes):
            stored = checkpoint_md.chunks[stored_position]
            items.append(
                ReadItem(
                    LoadItemType.TENSOR,
                    MetadataIndex(fqn, local.offsets, position),
                    _within(offsets, local),
                    MetadataIndex(fqn, stored.offsets, stored_position),
                    _within(offsets, stored),
                    torch.Size(sizes),
                )
            )
    return items


def _within(offsets: Sequence[int], chunk: ChunkStorageMetadata) -> torch.Size:
    """Offsets in the tensor, counted from the start of one of its chunks."""
    return torch.Size(mine - start for mine, start in zip(offsets, chunk.offsets, strict=True))
