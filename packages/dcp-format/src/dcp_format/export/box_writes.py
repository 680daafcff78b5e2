"""Writes of a tensor's box into the whole tensor's place in a file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dcp_core import WriteItem
from dcp_format.content.changes import CastData
from dcp_format.export.file_map import TensorPlace, checked_payload, form_of, tensor_data_of
from dcp_io import PiecewiseData, RangeSink
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.index.runs import Runs, box_runs

_PIECE_BYTES = 4 << 20
# As often as the engine of checkpoints does it: the disk works while the rest is written.
_SYNC_STEP_BYTES = 32 << 20


def write_box(sink: RangeSink, place: TensorPlace, item: WriteItem, data: object) -> int:
    """Write an item's box into its tensor's place in a file, cast to the file's dtype, in pieces of 4 MiB."""
    chunk = tensor_data_of(item)
    runs = box_runs(chunk.size, chunk.chunk.offsets, chunk.chunk.sizes, ITEM_BYTES[place.dtype])
    position = started = 0
    for piece in cast_pieces(item, data, place.dtype):
        _write_piece(sink, place.offset, runs, position, piece)
        position += len(piece)
        if runs.count == 1 and position - started >= _SYNC_STEP_BYTES:
            # Not for many runs: other ranks write into the same pages, which would go to the disk twice.
            sink.start_sync(place.offset + runs.start + started, position - started)
            started = position
    return position


def _write_piece(sink: RangeSink, base: int, runs: Runs, position: int, piece: memoryview) -> None:
    for start, at, size in runs.spans(position, len(piece)):
        sink.write_at(base + start, [piece[at : at + size]])


def copy_run_bytes(band: memoryview, begin: int, runs: Runs, position: int, piece: memoryview) -> None:
    """Copy bytes of a box into a range of the tensor's bytes."""
    length = runs.run_bytes
    whole = len(piece) // length
    if position % length == 0 and whole * length == len(piece) and whole > 1:
        starts = runs.starts(position // length, position // length + whole)
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
