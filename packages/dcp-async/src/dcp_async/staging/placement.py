"""Layout of tensor copies in an arena. With a `Budget`, the largest copies pass through a window of it in waves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import PAGESIZE

import numpy as np
import numpy.typing as npt
import torch

from dcp_async.options import SaverOptions

I64 = npt.NDArray[np.int64]

_ALIGNMENT = 64
# Smaller tensors stay resident: a planner may compare their values, and a message for each would cost more than a copy.
_WAVE_MIN_BYTES = 128 << 10
_PIECE_MIN_BYTES, _PIECE_MAX_BYTES = 4 << 10, 4 << 20
_WINDOW_PIECES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """Memory extents of tensors, from first to last element."""

    devices: I64
    """0 is host memory."""
    addresses: I64
    extents: I64
    """In bytes; 0 for empty tensors."""
    element_bytes: I64
    """Less than the extent with gaps, more with overlaps."""
    item_bytes: I64
    room: I64
    """Bytes from the first element to the end of the storage."""

    def same_as(self, other: Sources) -> bool:
        """Return whether both are equal."""
        return all(map(np.array_equal, self.columns(), other.columns()))

    def columns(self) -> tuple[I64, ...]:
        """Return all fields in order."""
        return self.devices, self.addresses, self.extents, self.element_bytes, self.item_bytes, self.room

    def without_memory(self) -> list[int]:
        """Return the indices of tensors beyond the end of their storage, such as freed ones."""
        nowhere = (self.addresses == 0) & (self.devices == 0)
        rows: list[int] = np.flatnonzero((self.extents > 0) & (nowhere | (self.extents > self.room))).tolist()
        return rows


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory for copies in bytes."""

    nbytes: int

    @classmethod
    def of(cls, options: SaverOptions) -> Budget | None:
        """Return the budget for waves, if `options` allow them."""
        if options.staging == "refuse" or options.max_staging_bytes is None:
            return None
        return cls(options.max_staging_bytes // PAGESIZE * PAGESIZE)

    @property
    def piece_bytes(self) -> int:
        """Size of a slot of the window."""
        piece = min(_PIECE_MAX_BYTES, max(_PIECE_MIN_BYTES, self.nbytes // 64))
        return piece // _ALIGNMENT * _ALIGNMENT

    @property
    def resident_bytes(self) -> int:
        """Bytes for copies beside a window."""
        return max(0, self.nbytes - _WINDOW_PIECES * self.piece_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Layout of copies in an arena; offsets are in bytes."""

    offsets: I64
    compact: npt.NDArray[np.bool_]
    """Whether a copy leaves out gaps."""
    nbytes: int
    resident_bytes: int
    """Offset from which on tensors are copied in waves."""
    pieces: tuple[I64, I64, I64]
    """Ranges of host memory to copy unchanged: addresses, offsets, lengths."""
    by_tensor: I64
    """Indices of tensors to copy separately: on devices, or `compact`."""

    @property
    def wave_bytes(self) -> int:
        """Bytes copied in waves."""
        return self.nbytes - self.resident_bytes

    def key(self) -> bytes:
        """Return bytes that identify the layout."""
        return self.offsets.tobytes() + self.compact.tobytes() + self.resident_bytes.to_bytes(8, "little")


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


def place(sources: Sources, budget: Budget | None = None) -> Placement:
    """Return the layout of the copies of tensors in an arena.

    Tensors that share memory share it there, as one aligned group, so views stay views. Groups that do not fit into
    `budget` come last.
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
    smallest = np.full(len(first), _WAVE_MIN_BYTES, np.int64)
    np.minimum.at(smallest, stretch, sources.element_bytes[order])
    slots = -(-np.concatenate([lengths, sources.extents[lone]]) // _ALIGNMENT) * _ALIGNMENT
    later = _beyond(slots, np.flatnonzero(smallest >= _WAVE_MIN_BYTES), budget)
    base, resident_bytes = _in_order(slots, later)
    begin, apart, fits = base[: len(first)], base[len(first) :], ~later[: len(first)]
    offsets, compact = np.zeros(len(sources.addresses), np.int64), np.zeros(len(sources.addresses), bool)
    offsets[order], offsets[lone] = begin[stretch] + within, apart
    compact[order] = gaps
    whole, on_host = fits & (devices[first] == 0) & ~gaps[first], sources.devices[lone] == 0
    pieces = (
        np.concatenate([starts[first][whole], sources.addresses[lone][on_host]]),
        np.concatenate([(begin + leads)[whole], apart[on_host]]),
        np.concatenate([(lengths - leads)[whole], sources.extents[lone][on_host]]),
    )
    by_tensor = np.sort(np.concatenate([order[fits[stretch] & (gaps | (devices != 0))], lone[~on_host]]))
    return Placement(offsets, compact, int(slots.sum()), resident_bytes, pieces, by_tensor)


def _beyond(slots: I64, movable: I64, budget: Budget | None) -> npt.NDArray[np.bool_]:
    later = np.zeros(len(slots), bool)
    if budget is None or slots.sum() <= budget.nbytes:
        return later
    later[movable] = True
    room = budget.resident_bytes - int(slots[~later].sum())
    for row in movable[np.argsort(slots[movable], kind="stable")].tolist():
        room -= int(slots[row])
        if room < 0:
            break
        later[row] = False
    return later


def _in_order(slots: I64, later: npt.NDArray[np.bool_]) -> tuple[I64, int]:
    order = np.argsort(later, kind="stable")
    base = np.zeros(len(slots), np.int64)
    base[order[1:]] = np.cumsum(slots[order])[:-1]
    return base, int(slots[~later].sum())


def _begins(devices: I64, starts: I64, stops: I64) -> npt.NDArray[np.bool_]:
    begins = np.ones(len(starts), bool)
    for device in sorted({*devices.tolist()}):
        rows = np.flatnonzero(devices == device)
        begins[rows[1:]] = starts[rows[1:]] >= np.maximum.accumulate(stops[rows])[:-1]
    return begins
