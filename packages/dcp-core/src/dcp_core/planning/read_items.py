"""Local planning of a load: the read items of one rank, and all mismatches of template and checkpoint.

Source: torch 2.13 `default_planner.create_default_local_load_plan`, `planner_helpers` (contract; stock reports the
first problem only, converts dtypes silently, and does not see missing chunks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_core.planning.load_report import SHOWN_PROBLEMS, LoadProblem, NearNames, suggest
from dcp_core.planning.template_memory import find_shared_memory, is_same_place
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from dcp_core.records.plan import LoadItemType, ReadItem
from dcp_core.shards.shards import LocalTensor, local_tensor
from dcp_core.state_dict.key_map import KeyMap
from dcp_core.tables.load_columns import ReadColumns, WholeTensors
from dcp_core.tables.records_of_index import StateRecords, records_of
from dcp_core.tensors.casts import is_lossless_cast
from dcp_core.tensors.quantized import is_quantized_dtype
from dcp_manifest.index.boxes import box_text, find_hole, find_overlap, intersect, overlaps

__all__ = ["LoadRules", "LocalLoadPlan", "create_read_items_for_chunk_list", "plan_local_load"]


@dataclass(slots=True)
class LocalLoadPlan:
    """Local load plan of this rank: read items, mismatches, and other findings for the load report.

    Attributes:
        items: Read items of this rank.
        problems: Mismatches of template and checkpoint that the rules of the load do not allow.
        missing: Keys of the template that are missing from the checkpoint, and may be.
        cast: Key → (stored dtype, dtype in the template), for tensors that are converted.
    """

    items: list[ReadItem] = field(default_factory=list)
    problems: list[LoadProblem] = field(default_factory=list)
    matched: list[str] = field(default_factory=list)
    """Keys of the template that are loaded, including keys of tensors of which this rank holds no shard."""
    missing: list[str] = field(default_factory=list)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Key → (stored shape, shape in the template), for tensors loaded with `allow_resize`."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Key in the template → key in the checkpoint, where they differ."""
    unexpected: list[str] = field(default_factory=list)
    """Keys of the checkpoint that no key of the template corresponds to."""
    targets: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Pairs (key, local tensor to fill); without tensors that a tensor subclass provides through its own methods."""
    overlapping: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of keys whose tensors share memory in the template although they were not tied at the save."""


@dataclass(frozen=True, slots=True)
class LoadRules:
    """Rules of a load: which mismatches of template and checkpoint are allowed.

    Args:
        allow_missing: Whether keys of the template may be missing from the checkpoint.
        allow_unexpected: Whether keys of the checkpoint may be missing from the template.
        allow_lossy_casts: Whether conversions to a dtype that cannot represent all stored numbers are allowed.
        allow_resize: Whether tensors may have other sizes in the checkpoint, with the same number of dimensions; only
            elements at indices that both tensors have are loaded.
        keys: Mapping of keys in the template to keys in the checkpoint.
    """

    allow_missing: bool = False
    allow_unexpected: bool = True
    allow_lossy_casts: bool = False
    allow_resize: bool = False
    keys: KeyMap = field(default_factory=KeyMap)


def plan_local_load(state_dict: dict[str, Any], metadata: Metadata, rules: LoadRules) -> LocalLoadPlan:
    """Compare a flat template with a checkpoint's metadata, and plan the reads of this rank.

    Args:
        state_dict: Template: FQN → tensor of any kind, or object.
        metadata: Metadata of the checkpoint.
        rules: Rules that decide which mismatches are problems.

    Returns:
        The read items, and all problems; this function raises no error for problems.
    """
    planned = LocalLoadPlan()
    records = records_of(metadata)
    columns = None if records is None else ReadColumns(records, [], planned.items)
    whole = None if records is None else WholeTensors(records)
    entries = metadata.state_dict_metadata
    missing: list[tuple[str, str]] = []
    for fqn, value in state_dict.items():
        stored = rules.keys.stored(fqn) if rules.keys else fqn
        if stored != fqn:
            planned.renamed[fqn] = stored
        elif columns is not None and whole is not None and whole.match(fqn, value):
            columns.names.append(fqn)
            continue
        entry = entries.get(stored)
        if entry is None:
            missing.append((fqn, stored))
            continue
        held = local_tensor(fqn, value)
        if isinstance(entry, TensorStorageMetadata):
            _plan_tensor(planned, fqn, stored, value, held, entry, rules)
        elif isinstance(entry, BytesStorageMetadata) and held is None:
            planned.items.append(_object_item(MetadataIndex(fqn), MetadataIndex(stored)))
            planned.matched.append(fqn)
        else:
            _problem(planned, fqn, "kind", f"{fqn!r} is a tensor in the template but an object in the checkpoint")
    meant = {planned.renamed.get(fqn, fqn) for fqn in state_dict} if planned.renamed else state_dict.keys()
    planned.unexpected = [name for name in entries if name not in meant]
    _report_names(planned, missing, state_dict, rules)
    if columns is not None:
        planned.matched.extend(columns.names)
        planned.targets.extend((name, state_dict[name]) for name in columns.names)
        planned.items = LazyList(columns)
    _look_at_memory(planned, records)
    return planned


def _look_at_memory(planned: LocalLoadPlan, records: StateRecords | None) -> None:
    """Record targets that cannot be filled, and targets that share memory and may get different values."""
    keys = [key for key, _ in planned.targets]
    found = find_shared_memory(keys, [tensor for _, tensor in planned.targets])
    planned.problems.extend(found.problems)
    for one, other in found.shared:
        names = [planned.renamed.get(keys[position], keys[position]) for position in (one, other)]
        tied = is_same_place(planned.targets[one][1], planned.targets[other][1])
        if not (tied and records is not None and records.is_same_data(*names)):
            planned.overlapping.append((keys[one], keys[other]))


def _report_names(
    planned: LocalLoadPlan, missing: list[tuple[str, str]], state_dict: dict[str, Any], rules: LoadRules
) -> None:
    """Record names that only the template or only the checkpoint has, as problems unless the rules allow them."""
    planned.missing = [fqn for fqn, _ in missing]
    near = NearNames(planned.unexpected) if missing and not rules.allow_missing else None
    for number, (fqn, stored) in enumerate(missing if near is not None else ()):
        wanted = f"{fqn!r}" if stored == fqn else f"{fqn!r} (as {stored!r})"
        likely = near.suggest(stored) if near is not None and number < SHOWN_PROBLEMS else ""
        _problem(planned, fqn, "missing", f"{wanted} is not in the checkpoint{likely}")
    if not rules.allow_unexpected:
        for name in planned.unexpected:
            _problem(planned, name, "unexpected", f"{name!r} is in the checkpoint but not in the template")
    for path in rules.keys.unused(state_dict):
        likely = suggest(path, state_dict)
        _problem(planned, path, "rename", f"rename names {path!r}, which is not in the template{likely}")


def _problem(planned: LocalLoadPlan, key: str, kind: str, message: str) -> None:
    planned.problems.append(LoadProblem(key, kind, message))


def _object_item(index: MetadataIndex, stored: MetadataIndex) -> ReadItem:
    nothing = torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, stored, nothing, nothing)


def _plan_tensor(
    planned: LocalLoadPlan,
    fqn: str,
    stored_name: str,
    value: Any,
    held: LocalTensor | None,
    entry: TensorStorageMetadata,
    rules: LoadRules,
) -> None:
    if held is None:
        kind = type(value).__qualname__
        _problem(planned, fqn, "kind", f"{fqn!r} is a {kind} in the template but a tensor in the checkpoint")
        return
    problem = _misfit(planned, fqn, held, entry, rules) or _damage(fqn, held, entry)
    if problem is not None:
        _problem(planned, fqn, *problem)
        return
    if tuple(held.size) != tuple(entry.size):
        planned.resized[fqn] = tuple(entry.size), tuple(held.size)
    planned.items.extend(_read_items(fqn, stored_name, entry, held.chunks))
    planned.matched.append(fqn)
    if not hasattr(value, "__create_chunk_list__"):
        planned.targets.extend((fqn, shard.get()) for shard in held.shards)


def _misfit(
    planned: LocalLoadPlan, fqn: str, held: LocalTensor, entry: TensorStorageMetadata, rules: LoadRules
) -> tuple[str, str] | None:
    """Return kind and text of a mismatch between a stored tensor and its target; records conversions."""
    if tuple(held.size) != tuple(entry.size):
        alike = len(held.size) == len(entry.size)
        if not (rules.allow_resize and alike):
            text = f"{fqn!r} has shape {tuple(held.size)} in the template but {tuple(entry.size)} in the checkpoint"
            remedy = "; pass DefaultLoadPlanner(allow_resize=True) to load the common part" if alike else ""
            return "shape", text + remedy
    stored, wanted = entry.properties.dtype, held.dtype
    if stored != wanted:
        names = (str(stored).removeprefix("torch."), str(wanted).removeprefix("torch."))
        planned.cast[fqn] = names
        if not rules.allow_lossy_casts and not is_lossless_cast(stored, wanted):
            remedy = "pass DefaultLoadPlanner(allow_lossy_casts=True) to convert, or change the template's dtype"
            return "cast", f"{fqn!r}: {names[0]} → {names[1]} would lose values; {remedy}"
    return None


def _damage(fqn: str, held: LocalTensor, entry: TensorStorageMetadata) -> tuple[str, str] | None:
    """Return kind and text of damage in the stored boxes of a tensor, where this rank needs them."""
    stored_boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    twice = find_overlap(stored_boxes) if len(stored_boxes) > 1 else None
    if twice is not None:
        one, other = (box_text(*stored_boxes[position]) for position in twice)
        return "overlap", f"{fqn!r}: the checkpoint stores elements twice, in {one} and in {other}"
    whole = ((0,) * len(entry.size), entry.size)
    for chunk in held.chunks:
        wanted = intersect((chunk.offsets, chunk.sizes), whole)
        hole = None if wanted is None else find_hole(wanted, stored_boxes)
        if hole is not None:
            return "hole", f"{fqn!r}: the checkpoint has no data for {box_text(*hole)} of {tuple(entry.size)}"
    return None


def create_read_items_for_chunk_list(
    fqn: str, checkpoint_md: TensorStorageMetadata, local_chunks: Sequence[ChunkStorageMetadata]
) -> list[ReadItem]:
    """Return one read item for each overlap of a stored chunk with a local chunk.

    Args:
        fqn: FQN of the tensor.
        checkpoint_md: Metadata of the tensor in the checkpoint.
        local_chunks: Boxes of the tensor that this rank loads, in elements.

    Source: torch 2.13 `planner_helpers.create_read_items_for_chunk_list`.
    """
    return _read_items(fqn, fqn, checkpoint_md, local_chunks)


def _read_items(
    fqn: str, stored_name: str, checkpoint_md: TensorStorageMetadata, local_chunks: Sequence[ChunkStorageMetadata]
) -> list[ReadItem]:
    items: list[ReadItem] = []
    stored_boxes = [(chunk.offsets, chunk.sizes) for chunk in checkpoint_md.chunks]
    for position, local in enumerate(local_chunks):
        box = (local.offsets, local.sizes)
        shared = overlaps(box, stored_boxes)
        if 0 in local.sizes and is_quantized_dtype(checkpoint_md.properties.dtype):  # there is still the quantizer
            shared = [(at, *stored) for at, stored in enumerate(stored_boxes) if stored == box]
        for stored_position, offsets, sizes in shared:
            stored = checkpoint_md.chunks[stored_position]
            items.append(
                ReadItem(
                    LoadItemType.TENSOR,
                    MetadataIndex(fqn, local.offsets, position),
                    _within(offsets, local),
                    MetadataIndex(stored_name, stored.offsets, stored_position),
                    _within(offsets, stored),
                    torch.Size(sizes),
                )
            )
    return items


def _within(offsets: Sequence[int], chunk: ChunkStorageMetadata) -> torch.Size:
    """Return offsets in the tensor as offsets from the start of one of its chunks."""
    return torch.Size(mine - start for mine, start in zip(offsets, chunk.offsets, strict=True))
