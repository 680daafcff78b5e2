"""Memory checks of a template's tensors: finds tensors that cannot be filled, and tensors that share memory.

The checks use only addresses and strides, not the elements. The reads are planned in `read_items`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from dcp_core.planning.load_report import LoadProblem

__all__ = ["MemoryFindings", "find_shared_memory", "is_same_place"]

_MAPS = "/proc/self/maps"
# At most so many pairs with overlapping address ranges are checked: columns of one matrix give millions of pairs.
_MAX_PAIRS = 10_000
# Work limit for numpy to distinguish interleaved tensors from overlapping ones; beyond it they count as overlapping.
_MAX_WORK = 10_000


@dataclass(slots=True)
class MemoryFindings:
    """Result of the memory checks of a template: tensors that cannot be filled, and tensors that share memory."""

    problems: list[LoadProblem] = field(default_factory=list)
    """Tensors that cannot be filled, because their elements share memory or the memory is mapped read-only."""
    shared: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of indices of tensors that share memory, into the checked tensors; incomplete if there are thousands."""


def find_shared_memory(keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> MemoryFindings:
    """Find tensors of a template that share memory with each other, have overlapping elements, or are read-only.

    Args:
        keys: FQN of each tensor.
        tensors: Strided tensors with data, on any device; may be views.

    Returns:
        All findings; this function raises no error for them.
    """
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


def is_same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are views of the same elements in the same order, as tied parameters are."""
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        *(other.data_ptr(), other.shape, other.stride(), other.dtype),
    )


def _span_elements(tensor: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first to its last address, both included; 0 for an empty one."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _has_repeated_dim(tensor: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _neighbours(starts: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
    """Yield pairs of positions whose ranges of addresses overlap, the lower position first."""
    order = np.argsort(starts, kind="stable")
    order = order[sizes[order] > 0]
    begins, ends = starts[order], (starts + sizes)[order]
    if not len(order) or not (begins[1:] < np.maximum.accumulate(ends)[:-1]).any():
        return
    # Number of later ranges that begin before each one ends.
    until = np.searchsorted(begins, ends)
    for at in np.flatnonzero(until > np.arange(len(order)) + 1).tolist():
        for later in range(at + 1, int(until[at])):
            yield tuple(sorted((int(order[at]), int(order[later]))))  # type: ignore[misc]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors whose address ranges overlap have an element's memory in common."""
    if one.device != other.device:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    try:
        return np.shares_memory(_addresses(one), _addresses(other), max_work=_MAX_WORK)  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, OverflowError):
        return True


def _addresses(tensor: torch.Tensor) -> npt.NDArray[np.void]:
    """Return an array at the address of a tensor; only its addresses may be used."""
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
    """Return the positions whose memory this process may not write to; none where the system does not report it."""
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
