"""Local plan of a load: read items, mismatches of template and checkpoint, and shared memory.

Source: torch 2.13 `default_planner.create_default_local_load_plan`, `planner_helpers` (only the first problem, silent
casts, and no check for missing chunks).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.load_report import SHOWN_PROBLEMS, LoadProblem, NearNames, suggest
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from dcp_core.records.protocols import LoadItemType, ReadItem
from dcp_core.shards.shards import LocalTensor, local_tensor
from dcp_core.state_dict.flatten import FlatState, KeyMap, flatten
from dcp_core.tables.metadata_columns import StateRecords, records_of
from dcp_core.tables.value_table import ReadColumns
from dcp_core.tensors.kinds import is_dtensor, is_lossless_cast, is_quantized_dtype, is_wrapper
from dcp_core.tensors.tensor_memory import has_memory
from dcp_manifest.index.boxes import box_text, find_hole, find_overlap, intersect, overlaps
from dcp_manifest.index.columns import ManifestInfo

_Chunks = Sequence[ChunkStorageMetadata]


@dataclass(slots=True)
class LocalLoadPlan:
    """Read items and findings of one rank."""

    items: list[ReadItem] = field(default_factory=list)
    problems: list[LoadProblem] = field(default_factory=list)
    matched: list[str] = field(default_factory=list)
    """Loaded keys, including tensors without a shard here."""
    missing: list[str] = field(default_factory=list)
    absent: list[tuple[Any, ...]] = field(default_factory=list)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    targets: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """(Key, local tensor) pairs, except a subclass's tensors."""
    overlapping: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadRules:
    """Allowed mismatches, and `keys` from template to checkpoint."""

    allow_missing: bool = False
    allow_unexpected: bool = True
    allow_lossy_casts: bool = False
    allow_resize: bool = False
    keys: KeyMap = field(default_factory=KeyMap)


def boxes_of(
    template: dict[str, Any], keys: KeyMap, *, is_flat: bool
) -> dict[str, list[tuple[torch.Size, torch.Size]]] | None:
    """Return the boxes (offsets and sizes) that this rank loads, by the tensors' names in the checkpoint.

    None if the template has an empty dict or list, which gets everything that the checkpoint has below it.
    """
    boxes: dict[str, list[tuple[torch.Size, torch.Size]]] = {}
    found = FlatState(template) if is_flat else flatten(template)
    if found.empty or any(type(value) is list and not value for value in found.values.values()):
        return None
    for fqn, value in found.values.items():
        try:
            held = local_tensor(fqn, value, allow_meta=True)
        except UnsupportedValueError:
            continue
        if held is not None and not is_quantized_dtype(held.dtype):
            boxes.setdefault(keys.stored(fqn), []).extend([(chunk.offsets, chunk.sizes) for chunk in held.chunks])
    return boxes


def plan_local_load(state_dict: dict[str, Any], metadata: Metadata, rules: LoadRules) -> LocalLoadPlan:
    """Plan this rank's reads; mismatches are not raised."""
    planned = LocalLoadPlan()
    records = records_of(metadata)
    columns = None if records is None else ReadColumns(records, [], planned.items)
    entries = metadata.state_dict_metadata
    missing: list[tuple[str, str]] = []
    for fqn, value in state_dict.items():
        stored = rules.keys.stored(fqn) if rules.keys else fqn
        if stored != fqn:
            planned.renamed[fqn] = stored
        elif columns is not None and columns.fits(fqn, value):
            columns.names.append(fqn)
            continue
        if stored not in entries:
            missing.append((fqn, stored))
            continue
        held = local_tensor(fqn, value)
        entry, positions = _entry(stored, held, metadata, records)
        if isinstance(entry, TensorStorageMetadata):
            _plan_tensor(planned, fqn, stored, value, held, entry, rules, positions)
        elif isinstance(entry, BytesStorageMetadata) and held is None:
            nothing, kind = torch.Size((0,)), LoadItemType.BYTE_IO
            planned.items.append(ReadItem(kind, MetadataIndex(fqn), nothing, MetadataIndex(stored), nothing, nothing))
            planned.matched.append(fqn)
        else:
            _problem(planned, fqn, "kind", f"{fqn!r} is a tensor in the template but an object in the checkpoint")
    if columns is not None:
        planned.matched.extend(columns.names)
        planned.targets.extend([(name, state_dict[name]) for name in columns.names])
        planned.items = LazyList(columns)
    if missing:
        missing = _without_filled(planned, missing, state_dict)
    meant = {planned.renamed.get(fqn, fqn) for fqn in state_dict} if planned.renamed else state_dict.keys()
    planned.unexpected = [name for name in entries if name not in meant]
    _report_names(planned, missing, state_dict, rules, None if records is None else records.index.info)
    _look_at_memory(planned, records)
    return planned


def _entry(
    stored: str, held: LocalTensor | None, metadata: Metadata, records: StateRecords | None
) -> tuple[STORAGE_TYPES, Sequence[int] | None]:
    """Return the entry of a value; of a tensor in many chunks, those that overlap local ones, and their positions."""
    near = None
    if records is not None and held is not None and not is_quantized_dtype(held.dtype):
        near = records.near(stored, [(chunk.offsets, chunk.sizes) for chunk in held.chunks])
    return (metadata.state_dict_metadata[stored], None) if near is None else near


def _without_filled(
    planned: LocalLoadPlan, missing: list[tuple[str, str]], state_dict: dict[str, Any]
) -> list[tuple[str, str]]:
    loaded = (fqn for fqn in planned.matched if fqn not in planned.resized)
    filled = MemoryRanges(tensor for fqn in loaded for tensor in _memory_of(fqn, state_dict[fqn]) or ())
    left = []
    for fqn, stored in missing:
        memory = _memory_of(fqn, state_dict[fqn])
        # A rank without a shard leaves the decision to the others.
        if memory is not None and all(has_memory(tensor) and filled.cover(tensor) for tensor in memory):
            planned.matched.append(fqn)
        else:
            left.append((fqn, stored))
    return left


def _memory_of(fqn: str, value: Any) -> list[torch.Tensor] | None:
    if hasattr(value, "__create_chunk_list__") and not is_dtensor(value):
        return None
    try:
        held = local_tensor(fqn, value)
    except UnsupportedValueError:  # unsupported tensors are not loaded
        return None
    memory = [] if held is None else [shard.get() for shard in held.shards]
    return None if held is None or not math.prod(held.size) or any(map(is_wrapper, memory)) else memory


def _look_at_memory(planned: LocalLoadPlan, records: StateRecords | None) -> None:
    keys = [key for key, _ in planned.targets]
    found = find_shared_memory(keys, [tensor for _, tensor in planned.targets])
    planned.problems.extend(found.problems)
    for one, other in found.shared:
        names = [planned.renamed.get(keys[position], keys[position]) for position in (one, other)]
        tied = is_same_place(planned.targets[one][1], planned.targets[other][1])
        if tied and records is not None and records.are_known_to_differ(*names):
            _problem(
                planned,
                keys[other],
                "tie",
                f"{keys[one]!r} and {keys[other]!r} share memory in the template, and have different values in the "
                "checkpoint; leave one of them out of the template, or untie them",
            )
        if not (tied and records is not None and records.is_same_data(*names)):
            planned.overlapping.append((keys[one], keys[other]))


def _report_names(
    planned: LocalLoadPlan,
    missing: list[tuple[str, str]],
    state_dict: dict[str, Any],
    rules: LoadRules,
    info: ManifestInfo | None,
) -> None:
    planned.missing = [fqn for fqn, _ in missing]
    near = NearNames(planned.unexpected) if missing and not rules.allow_missing else None
    for number, (fqn, stored) in enumerate(missing if near is not None else ()):
        renamed = "" if stored == fqn else f" ({fqn!r} in the template)"
        dropped = None if info is None else info.why_missing(stored)
        if dropped is not None:
            likely = f"; it was removed after the save ({dropped}): load another checkpoint"
        else:
            likely = near.suggest(stored) if near is not None and number < SHOWN_PROBLEMS else ""
        # PyTorch's words: programs match them and people search for them.
        _problem(planned, fqn, "missing", f"Missing key in checkpoint state_dict: {stored}{renamed}{likely or '.'}")
    if not rules.allow_unexpected:
        for name in planned.unexpected:
            _problem(planned, name, "unexpected", f"{name!r} is in the checkpoint but not in the template")
    for path in rules.keys.unused(state_dict) if rules.keys else ():
        likely = suggest(path, state_dict)
        _problem(planned, path, "rename", f"rename names {path!r}, which is not in the template{likely}")


def _problem(planned: LocalLoadPlan, key: str, kind: str, message: str) -> None:
    planned.problems.append(LoadProblem(key, kind, message))


def _plan_tensor(
    planned: LocalLoadPlan,
    fqn: str,
    stored_name: str,
    value: Any,
    held: LocalTensor | None,
    entry: TensorStorageMetadata,
    rules: LoadRules,
    positions: Sequence[int] | None,
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
    planned.items.extend(_read_items(fqn, stored_name, entry, held.chunks, positions))
    planned.matched.append(fqn)
    if is_dtensor(value) or not hasattr(value, "__create_chunk_list__"):
        targets = [shard.get() for shard in held.shards]
        planned.targets += [(fqn, target) for target in targets if not is_wrapper(target)]


def _misfit(
    planned: LocalLoadPlan, fqn: str, held: LocalTensor, entry: TensorStorageMetadata, rules: LoadRules
) -> tuple[str, str] | None:
    if tuple(held.size) != tuple(entry.size):
        alike = len(held.size) == len(entry.size)
        if not (rules.allow_resize and alike):
            sizes = f"saved {tuple(entry.size)} and current {tuple(held.size)}"
            remedy = "; pass DefaultLoadPlanner(allow_resize=True) to load the common part" if alike else "."
            return "shape", f"Size mismatch between {sizes} for {fqn}{remedy}"  # begins as PyTorch's error does
    stored, wanted = entry.properties.dtype, held.dtype
    if stored != wanted:
        names = (str(stored).removeprefix("torch."), str(wanted).removeprefix("torch."))
        planned.cast[fqn] = names
        if not rules.allow_lossy_casts and not is_lossless_cast(stored, wanted):
            remedy = "pass DefaultLoadPlanner(allow_lossy_casts=True) to convert, or change the template's dtype"
            return "cast", f"{fqn!r}: {names[0]} → {names[1]} would lose values; {remedy}"
    return None


def _damage(fqn: str, held: LocalTensor, entry: TensorStorageMetadata) -> tuple[str, str] | None:
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
    fqn: str, checkpoint_md: TensorStorageMetadata, local_chunks: _Chunks
) -> list[ReadItem]:
    """Return a read item per overlap of a stored with a local chunk."""
    return _read_items(fqn, fqn, checkpoint_md, local_chunks, None)


def _read_items(
    fqn: str, stored_name: str, entry: TensorStorageMetadata, chunks: _Chunks, places: Sequence[int] | None
) -> list[ReadItem]:
    items: list[ReadItem] = []
    stored_boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    for position, local in enumerate(chunks):
        box = (local.offsets, local.sizes)
        shared = overlaps(box, stored_boxes)
        if 0 in local.sizes and is_quantized_dtype(entry.properties.dtype):  # the quantizer must still be read
            shared = [(at, *stored) for at, stored in enumerate(stored_boxes) if stored == box]
        for stored_position, offsets, sizes in shared:
            stored = entry.chunks[stored_position]
            place = stored_position if places is None else places[stored_position]
            items.append(
                ReadItem(
                    LoadItemType.TENSOR,
                    MetadataIndex(fqn, local.offsets, position),
                    _within(offsets, local),
                    MetadataIndex(stored_name, stored.offsets, place),
                    _within(offsets, stored),
                    torch.Size(sizes),
                )
            )
    return items


def _within(offsets: Sequence[int], chunk: ChunkStorageMetadata) -> torch.Size:
    return torch.Size([mine - start for mine, start in zip(offsets, chunk.offsets, strict=True)])


_MAPS = "/proc/self/maps"
# Maximum number of overlapping pairs to check: the columns of one matrix form millions.
_MAX_PAIRS = 10_000
# Work limit for numpy to tell interleaved tensors from overlapping ones; beyond it they count as overlapping.
_MAX_WORK = 10_000


@dataclass(slots=True)
class MemoryFindings:
    """Tensors that cannot be filled or share memory."""

    problems: list[LoadProblem] = field(default_factory=list)
    shared: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of indices; incomplete if there are thousands."""


def find_shared_memory(keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> MemoryFindings:
    """Find tensors that share memory, have overlapping elements, or are read-only."""
    found = MemoryFindings()
    starts = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    sizes = np.array([tensor.nbytes for tensor in tensors], np.uint64)
    spread = [position for position, tensor in enumerate(tensors) if not tensor.is_contiguous()]
    for position in spread:
        tensor = tensors[position]
        span = _span_elements(tensor)
        sizes[position] = span * tensor.itemsize
        if tensor.numel() > span or _has_repeated_dim(tensor):
            key = keys[position]
            text = (
                f"{key!r}: several elements of the template's tensor share one place in memory (it is an expanded or "
                "overlapping view), so they cannot hold different values; put a contiguous copy (`.clone()`) there"
            )
            found.problems.append(LoadProblem(key, "memory", text))
    for position in _read_only(starts, sizes, [tensor.is_cpu for tensor in tensors]):
        key = keys[position]
        text = (
            f"{key!r}: the memory of the template's tensor is mapped read-only and cannot be filled; put a copy "
            "(`.clone()`) there, or map the file with write access"
        )
        found.problems.append(LoadProblem(key, "memory", text))
    pairs = itertools.islice(_neighbours(starts, sizes), _MAX_PAIRS)
    found.shared = [(one, other) for one, other in pairs if _overlap(tensors[one], tensors[other])]
    return found


class MemoryRanges:
    """Memory ranges per device that tensors fill without gaps."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._merged: dict[torch.device, tuple[list[int], list[int]]] = {}
        spans = sorted(
            (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, tensor.device)
            for tensor in tensors
            if tensor.nbytes and tensor.data_ptr() and _span_elements(tensor) == tensor.numel()
        )
        for _, begin, end, device in spans:
            begins, ends = self._merged.setdefault(device, ([], []))
            if ends and begin <= ends[-1]:
                ends[-1] = max(end, ends[-1])
            else:
                begins.append(begin)
                ends.append(end)

    def cover(self, tensor: torch.Tensor) -> bool:
        """Return whether one range contains a tensor."""
        begins, ends = self._merged.get(tensor.device, ([], []))
        begin, at = tensor.data_ptr(), bisect.bisect_right(begins, tensor.data_ptr()) - 1
        return tensor.numel() > 0 and at >= 0 and begin + _span_elements(tensor) * tensor.itemsize <= ends[at]


def is_same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors view the same elements in the same order."""
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        *(other.data_ptr(), other.shape, other.stride(), other.dtype),
    )


def _span_elements(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _has_repeated_dim(tensor: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _neighbours(starts: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
    order = np.argsort(starts, kind="stable")
    order = order[sizes[order] > 0]
    begins, ends = starts[order], (starts + sizes)[order]
    if not len(order) or not (begins[1:] < np.maximum.accumulate(ends)[:-1]).any():
        return
    # Number of later ranges that begin before each range ends.
    until = np.searchsorted(begins, ends)
    for at in np.flatnonzero(until > np.arange(len(order)) + 1).tolist():
        for later in range(at + 1, int(until[at])):
            yield tuple(sorted((int(order[at]), int(order[later]))))  # type: ignore[misc]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device != other.device:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    try:
        return np.shares_memory(_addresses(one), _addresses(other), max_work=_MAX_WORK)  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, OverflowError):
        return True


def _addresses(tensor: torch.Tensor) -> npt.NDArray[np.void]:
    size = tensor.itemsize
    place = {
        "version": 3,
        "typestr": f"|V{size}",
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * size for stride in tensor.stride()),
        "data": (tensor.data_ptr(), True),
    }
    return np.asarray(type("Place", (), {"__array_interface__": place})())


def _read_only(starts: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], on_cpu: list[bool]) -> Iterable[int]:
    try:
        with open(_MAPS, "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return ()
    spans = [line[: line.index(b" ")].split(b"-") for line in lines if line[line.index(b" ") + 2 :][:1] == b"w"]
    begins = np.array([int(begin, 16) for begin, _ in spans], np.uint64)
    ends = np.array([int(end, 16) for _, end in spans], np.uint64)
    # Adjacent ranges are merged.
    heads = np.flatnonzero(np.concatenate([[True], begins[1:] != ends[:-1]])) if len(begins) else np.zeros(0, int)
    merged_begins, merged_ends = begins[heads], ends[np.concatenate([heads[1:] - 1, [len(ends) - 1]])]
    place = np.searchsorted(merged_begins, starts, side="right").astype(np.int64) - 1
    inside = (place >= 0) & (merged_ends[np.maximum(place, 0)] >= starts + sizes)
    wanted = np.array(on_cpu, bool) & (sizes > 0) & ~inside
    return [int(position) for position in np.flatnonzero(wanted)]
