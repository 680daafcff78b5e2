"""Bytes that each rank of a job would read and write, computed from a checkpoint's index.

Tensors are sharded along their first dimension, as FSDP does. Every rank reads scalars.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from dcp_io.reading.read_plan import range_of_values
from dcp_manifest import CheckpointIndex, StoredChunk, stored_tensors
from dcp_manifest.index.dtypes import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes [start, stop) of a file that one rank needs from a chunk."""

    name: str
    rank: int
    file: str
    start: int
    stop: int


@dataclass(slots=True)
class RankLoad:
    """Reads and writes of one rank."""

    rank: int
    needed_bytes: int = 0
    read_bytes: int = 0
    """Bytes of all CRC blocks with needed bytes."""
    reads: int = 0
    files: set[str] = field(default_factory=set)
    write_bytes: int = 0
    """Bytes of its shards and its share of replicated values."""


def row_range(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank's rows, as torch's `chunk` and DTensor divide them."""
    step = -(-rows // world_size)
    return min(rows, rank * step), min(rows, (rank + 1) * step)


def plan_reads(
    index: CheckpointIndex, world_size: int, *, want_segments: bool = True
) -> tuple[list[RankLoad], list[Segment]]:
    """Compute reads per rank; `want_segments` can mean very many."""
    ranks = [RankLoad(rank) for rank in range(world_size)]
    every = RankLoad(-1)
    segments = []
    filled = ((tensor.shape, chunk) for tensor in stored_tensors(index) for chunk in tensor.chunks if all(chunk.sizes))
    for shape, chunk in filled:
        if not shape and not want_segments:
            _segment(chunk, shape, every, world_size)
            continue
        for load in ranks[slice(*_readers(chunk, shape, world_size))]:
            segment = _segment(chunk, shape, load, world_size)
            if segment is not None and want_segments:
                segments.append(segment)
    for load in ranks:
        load.needed_bytes += every.needed_bytes
        load.read_bytes += every.read_bytes
        load.reads += every.reads
        load.files |= every.files
    return ranks, segments


def _readers(chunk: StoredChunk, shape: tuple[int, ...], world_size: int) -> tuple[int, int]:
    if not shape:
        return 0, world_size
    step = max(1, -(-shape[0] // world_size))
    return chunk.offsets[0] // step, min(world_size, -(-(chunk.offsets[0] + chunk.sizes[0]) // step))


def _segment(chunk: StoredChunk, shape: tuple[int, ...], load: RankLoad, world_size: int) -> Segment | None:
    item = chunk.item
    if shape:
        low, high = row_range(shape[0], load.rank, world_size)
        first, last = max(low, chunk.offsets[0]), min(high, chunk.offsets[0] + chunk.sizes[0])
    else:
        first, last = 0, 1
    if first >= last:
        return None
    row_bytes = math.prod(chunk.sizes[1:]) * ITEM_BYTES.get(chunk.dtype, 1)
    base = chunk.offsets[0] if chunk.offsets else 0
    start, stop = (first - base) * row_bytes, (last - base) * row_bytes
    load.needed_bytes += stop - start
    start, stop = range_of_values(item, start, stop)
    load.read_bytes += stop - start
    load.reads += 1
    load.files.add(item.file)
    return Segment(chunk.name, load.rank, item.file, item.offset + item.lead + start, item.offset + item.lead + stop)


def plan_writes(index: CheckpointIndex, ranks: list[RankLoad]) -> None:
    """Add each rank's writes; scalars go to the rank with the fewest bytes."""
    shape_starts, world_size = index.shape_starts(), len(ranks)
    scalars = []
    for row in range(len(index.tensor_names)):
        shape = tuple(index.tensor_shape[shape_starts[row] : shape_starts[row + 1]].tolist())
        size = ITEM_BYTES.get(index.dtypes[index.tensor_dtype[row]], 1)
        if not shape:
            scalars.append(size)
            continue
        row_bytes, step = math.prod(shape[1:]) * size, max(1, -(-shape[0] // world_size))
        for load in ranks[: -(-shape[0] // step)]:
            low, high = row_range(shape[0], load.rank, world_size)
            load.write_bytes += (high - low) * row_bytes
    least = [(load.write_bytes, load.rank) for load in ranks]
    heapq.heapify(least)
    for size in scalars:
        written, rank = least[0]
        heapq.heapreplace(least, (written + size, rank))
        ranks[rank].write_bytes = written + size
