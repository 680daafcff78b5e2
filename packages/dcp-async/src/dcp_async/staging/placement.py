"""Layout of tensor copies in an arena: bytes that several tensors share are copied once, and unused bytes are not.

This module computes only with addresses and sizes; tensors are copied in `copying`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["I64", "Placement", "Sources", "place", "sources_of"]

I64 = npt.NDArray[np.int64]

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """Memory extents of tensors: for each tensor, the range of bytes from its first element to its last."""

    devices: I64
    """Number of each tensor's device; 0 is host memory."""
    addresses: I64
    extents: I64
    """Length of each tensor's extent in bytes; 0 for empty tensors."""
    element_bytes: I64
    """Number of elements times element size, in bytes: less than the extent if there are gaps, more with overlaps."""
    item_bytes: I64
    """Size of one element of each tensor in bytes."""
    room: I64
    """Size in bytes of each tensor's storage from the tensor's first element to the end."""

    def same_as(self, other: Sources) -> bool:
        """Return whether `other` describes the same memory extents."""
        return all(map(np.array_equal, self.columns(), other.columns()))

    def columns(self) -> tuple[I64, ...]:
        """Return the arrays of all fields, in the order of the fields."""
        return self.devices, self.addresses, self.extents, self.element_bytes, self.item_bytes, self.room

    def without_memory(self) -> list[int]:
        """Return the indices of tensors that extend beyond the end of their storage, such as freed storages."""
        nowhere = (self.addresses == 0) & (self.devices == 0)
        rows: list[int] = np.flatnonzero((self.extents > 0) & (nowhere | (self.extents > self.room))).tolist()
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Layout of tensor copies in an arena, which takes `nbytes` bytes; offsets are from the start of the arena."""

    offsets: I64
    """Offset of each tensor's first element in the arena, in bytes."""
    compact: npt.NDArray[np.bool_]
    """Whether a tensor is copied without the gaps between its elements, so that its copy is contiguous."""
    nbytes: int
    pieces: tuple[I64, I64, I64]
    """Ranges of host memory to copy unchanged: source addresses, offsets in the arena, lengths in bytes."""
    by_tensor: I64
    """Indices of tensors that are copied one by one: tensors on devices, and tensors whose copies are `compact`."""

    def key(self) -> bytes:
        """Return bytes that are equal for placements with the same `offsets` and `compact`."""
        return self.offsets.tobytes() + self.compact.tobytes()


def sources_of(tensors: Sequence[torch.Tensor]) -> Sources:
    """Return the memory extents of tensors."""
    numbers: dict[torch.device, int] = {}
    devices = [0 if tensor.is_cpu else 1 + numbers.setdefault(tensor.device, len(numbers)) for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    element_bytes = [tensor.nbytes for tensor in tensors]
    extents = [
        nbytes if tensor.is_contiguous() else _extent(tensor)
        for tensor, nbytes in zip(tensors, element_bytes, strict=True)
    ]
    item_bytes = [tensor.dtype.itemsize for tensor in tensors]
    room = [
        tensor.untyped_storage().nbytes() - tensor.storage_offset() * size
        for tensor, size in zip(tensors, item_bytes, strict=True)
    ]
    columns = (devices, addresses, extents, element_bytes, item_bytes, room)
    return Sources(*(np.array(each, np.int64) for each in columns))


def _extent(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.dtype.itemsize


def place(sources: Sources) -> Placement:
    """Return the layout of the copies of tensors in an arena.

    Tensors that share memory share it in the arena, too, so views stay views. Each group of tensors that share memory
    is aligned.
    """
    # A tensor that is not aligned for its dtype is copied separately, as bytes: in the arena torch might crash on it.
    astray = sources.addresses % sources.item_bytes != 0
    lone = np.flatnonzero((sources.extents > 0) & astray)
    used = np.flatnonzero((sources.extents > 0) & ~astray)
    order = used[np.lexsort((sources.addresses[used], sources.devices[used]))]
    starts, extents, devices = sources.addresses[order], sources.extents[order], sources.devices[order]
    begins = _begins(devices, starts, starts + extents)
    stretch, first = np.cumsum(begins) - 1, np.flatnonzero(begins)
    alone = np.bincount(stretch, minlength=len(first)) == 1
    # Overlapping extents keep their distance from an alignment border, so that aligned tensors stay aligned.
    leads = np.where(alone, 0, starts[first] % _ALIGNMENT)
    within = starts - starts[first][stretch] + leads[stretch]
    lengths = np.zeros(len(first), np.int64)
    np.maximum.at(lengths, stretch, within + extents)
    # A tensor that covers less than its extent is copied without the gaps, unless they contain other tensors.
    gaps = alone[stretch] & (sources.element_bytes[order] < extents)
    lengths[stretch[gaps]] = sources.element_bytes[order][gaps]
    slots = np.concatenate([lengths, sources.extents[lone]])
    base = np.concatenate([[0], np.cumsum(-(-slots // _ALIGNMENT) * _ALIGNMENT)]).astype(np.int64)
    begin, apart = base[: len(first)], base[len(first) : -1]
    offsets, compact = np.zeros(len(sources.addresses), np.int64), np.zeros(len(sources.addresses), bool)
    offsets[order], offsets[lone] = begin[stretch] + within, apart
    compact[order] = gaps
    whole, on_host = (devices[first] == 0) & ~gaps[first], sources.devices[lone] == 0
    pieces = (
        np.concatenate([starts[first][whole], sources.addresses[lone][on_host]]),
        np.concatenate([(begin + leads)[whole], apart[on_host]]),
        np.concatenate([(lengths - leads)[whole], sources.extents[lone][on_host]]),
    )
    by_tensor = np.sort(np.concatenate([order[gaps | (devices != 0)], lone[~on_host]]))
    return Placement(offsets, compact, int(base[-1]), pieces, by_tensor)


def _begins(devices: I64, starts: I64, stops: I64) -> npt.NDArray[np.bool_]:
    """Mark the extents that begin a group: those that no earlier extent on their device overlaps."""
    begins = np.ones(len(starts), bool)
    for device in np.unique(devices):
        rows = np.flatnonzero(devices == device)
        begins[rows[1:]] = starts[rows[1:]] >= np.maximum.accumulate(stops[rows])[:-1]
    return begins
