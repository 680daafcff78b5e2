"""Writes of a tensor's box into the whole tensor's place in a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dcp_core import WriteItem
from dcp_format.content.changes import CastData
from dcp_format.export.file_map import TensorPlace, checked_payload, form_of, tensor_data_of
from dcp_io import PiecewiseData, RangeSink
from dcp_manifest.index.dtypes import ITEM_BYTES

_PIECE_BYTES = 4 << 20
# As often as the engine of checkpoints does it: the disk works while the rest is written.
_SYNC_STEP_BYTES = 32 << 20


class BoxRuns:
    """The contiguous runs of bytes of a box in the row-major bytes of the whole tensor."""

    def __init__(self, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int) -> None:
        outer = len(shape)
        while outer and sizes[outer - 1] == shape[outer - 1]:
            outer -= 1
        outer = max(0, outer - 1)  # the first dimension that is not whole still belongs to a run
        strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
        self._sizes = tuple(sizes[:outer])
        self._strides = strides[:outer]
        self._first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        self.run_bytes = math.prod(sizes[outer:]) * itemsize
        self.count = math.prod(self._sizes)

    def starts(self, begin: int, end: int) -> list[int]:
        """Return the byte offsets of the runs [begin, end)."""
        if not self._sizes:
            return [self._first] * (end - begin)
        numbers = np.unravel_index(np.arange(begin, end), self._sizes)
        starts = self._first + sum(
            number.astype(np.int64) * stride for number, stride in zip(numbers, self._strides, strict=True)
        )
        found: list[int] = np.asarray(starts).tolist()
        return found

    def bytes_before(self, end: int) -> int:
        """Return how many of the box's bytes lie before the byte offset `end` of the tensor."""
        low, high = 0, self.count
        while low < high:  # the number of runs that begin before `end`
            middle = (low + high) // 2
            if self.starts(middle, middle + 1)[0] < end:
                low = middle + 1
            else:
                high = middle
        if not low:
            return 0
        return (low - 1) * self.run_bytes + min(self.run_bytes, end - self.starts(low - 1, low)[0])

    def spans(self, position: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in the tensor, offset in the bytes, size)."""
        first, within = divmod(position, self.run_bytes)
        last = -(-(position + length) // self.run_bytes)
        at = 0
        for start in self.starts(first, last):
            size = min(self.run_bytes - within, length - at)
            yield start + within, at, size
            at += size
            within = 0

    @property
    def extent(self) -> tuple[int, int]:
        """Half-open range of bytes from the box's first to its last byte; empty for an empty box."""
        if not self.count or not self.run_bytes:
            return self._first, self._first
        return self._first, self.starts(self.count - 1, self.count)[0] + self.run_bytes


def write_box(sink: RangeSink, place: TensorPlace, item: WriteItem, data: object) -> int:
    """Write an item's box into its tensor's place in a file, cast to the file's dtype, in pieces of 4 MiB."""
    chunk = tensor_data_of(item)
    runs = BoxRuns(chunk.size, chunk.chunk.offsets, chunk.chunk.sizes, ITEM_BYTES[place.dtype])
    position = started = 0
    for piece in cast_pieces(item, data, place.dtype):
        _write_piece(sink, place.offset, runs, position, piece)
        position += len(piece)
        if runs.count == 1 and position - started >= _SYNC_STEP_BYTES:
            # Not for many runs: other ranks write into the same pages, which would go to the disk twice.
            sink.start_sync(place.offset + runs.extent[0] + started, position - started)
            started = position
    return position


def _write_piece(sink: RangeSink, base: int, runs: BoxRuns, position: int, piece: memoryview) -> None:
    for start, at, size in runs.spans(position, len(piece)):
        sink.write_at(base + start, [piece[at : at + size]])


def copy_run_bytes(band: memoryview, begin: int, runs: BoxRuns, position: int, piece: memoryview) -> None:
    """Copy bytes of a box into a range of the tensor's bytes."""
    length = runs.run_bytes
    whole = len(piece) // length
    if position % length == 0 and whole * length == len(piece) and whole > 1:
        starts = np.asarray(runs.starts(position // length, position // length + whole))
        steps = np.diff(starts)
        if (steps == steps[0]).all():
            target = np.frombuffer(band, np.uint8)[starts[0] - begin :]
            rows = np.lib.stride_tricks.as_strided(target, (whole, length), (int(steps[0]), 1))
            rows[:] = np.frombuffer(piece, np.uint8).reshape(whole, length)
            return
    for start, at, size in runs.spans(position, len(piece)):
        band[start - begin : start - begin + size] = piece[at : at + size]


def cast_pieces(item: WriteItem, data: object, dtype: str) -> Iterator[memoryview]:
    """Yield the bytes of an item's tensor, cast to a dtype, in pieces of at most 4 MiB."""
    payload = checked_payload(item, data)
    value = payload.data
    stream: PiecewiseData = _Whole(memoryview(value)) if isinstance(value, (bytes, memoryview)) else value
    old = form_of(item)[0]
    if old != dtype:
        stream = CastData(stream, getattr(torch, old), getattr(torch, dtype))
    return stream.pieces(_PIECE_BYTES)


class _Whole:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.nbytes = len(data)

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        step = max(64, max_bytes // 64 * 64)
        for start in range(0, self.nbytes, step):
            yield self._data[start : start + step]
