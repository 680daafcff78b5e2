"""What each rank of a job would read and write: arithmetic over a checkpoint's index, no data is touched.

Every tensor is taken to be sharded along its first dimension, as FSDP does it: rank r of n holds the r-th of n equal
parts (the last ones may be short or empty); what has no dimension is read by every rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from dcp_io import range_of_values
from dcp_manifest import ITEM_BYTES, CheckpointIndex, StoredItem

__all__ = ["Chunk", "RankLoad", "Segment", "chunks_of", "plan_reads", "plan_writes", "row_range"]

_SMALL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored box of a tensor."""

    name: str
    item_bytes: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: StoredItem


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a chunk that one rank needs: bytes [start, stop) of the chunk's file."""

    name: str
    rank: int
    file: str
    start: int
    stop: int


@dataclass(slots=True)
class RankLoad:
    """What one rank has to do."""

    rank: int
    needed_bytes: int = 0
    """Of the tensors that it will hold."""
    read_bytes: int = 0
    """From storage: the CRC blocks that hold what is needed."""
    reads: int = 0
    files: set[str] = field(default_factory=set)
    write_bytes: int = 0
    """When the same job saves: its shards, and its share of what every rank holds."""


def row_range(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """The rows of a rank: equal parts, rounded up, as torch's `chunk` and DTensor cut."""
    step = -(-rows // world_size)
    return min(rows, rank * step), min(rows, (rank + 1) * step)


def chunks_of(index: CheckpointIndex) -> Iterator[Chunk]:
    """All stored chunks with elements."""
    items = index.chunk_items
    if items is None:
        return
    ragged = index.ragged_starts(items)
    chunk_starts, box_starts, shape_starts = index.chunk_starts(), index.box_starts(), index.shape_starts()
    for row, name in enumerate(index.tensor_names):
        ndim = int(index.tensor_ndim[row])
        shape = tuple(index.tensor_shape[shape_starts[row] : shape_starts[row + 1]].tolist())
        size = ITEM_BYTES.get(index.dtypes[index.tensor_dtype[row]], 1)
        for number, at in enumerate(range(int(chunk_starts[row]), int(chunk_starts[row + 1]))):
            box = slice(int(box_starts[row]) + number * ndim, int(box_starts[row]) + (number + 1) * ndim)
            offsets, sizes = index.chunk_offsets[box].tolist(), index.chunk_sizes[box].tolist()
            if math.prod(sizes):
                item = index.stored_item(items, at, ragged)
                yield Chunk(name, size, shape, tuple(offsets), tuple(sizes), item)


def plan_reads(
    index: CheckpointIndex, world_size: int, *, want_segments: bool = True
) -> tuple[list[RankLoad], list[Segment]]:
    """What each of `world_size` ranks reads, and which parts of which files that is.

    Args:
        index: Of the checkpoint.
        world_size: Number of ranks.
        want_segments: Whether the parts are wanted: where every rank reads every scalar, there are very many.
    """
    ranks = [RankLoad(rank) for rank in range(world_size)]
    every = RankLoad(-1)
    segments = []
    for chunk in chunks_of(index):
        if not chunk.sizes and not want_segments:
            _segment(chunk, every, world_size)
            continue
        for load in ranks[slice(*_readers(chunk, world_size))]:
            segment = _segment(chunk, load, world_size)
            if segment is not None and want_segments:
                segments.append(segment)
    for load in ranks:
        load.needed_bytes += every.needed_bytes
        load.read_bytes += every.read_bytes
        load.reads += every.reads
        load.files |= every.files
    return ranks, segments


def _readers(chunk: Chunk, world_size: int) -> tuple[int, int]:
    """The ranks [first, last) whose rows are among a chunk's; all for a scalar."""
    if not chunk.sizes:
        return 0, world_size
    step = max(1, -(-chunk.shape[0] // world_size))
    return chunk.offsets[0] // step, min(world_size, -(-(chunk.offsets[0] + chunk.sizes[0]) // step))


def _segment(chunk: Chunk, load: RankLoad, world_size: int) -> Segment | None:
    item = chunk.item
    if chunk.sizes:
        low, high = row_range(chunk.shape[0], load.rank, world_size)
        first, last = max(low, chunk.offsets[0]), min(high, chunk.offsets[0] + chunk.sizes[0])
    else:
        first, last = 0, 1
    if first >= last:
        return None
    row_bytes = math.prod(chunk.sizes[1:]) * chunk.item_bytes
    base = chunk.offsets[0] if chunk.offsets else 0
    start, stop = (first - base) * row_bytes, (last - base) * row_bytes
    load.needed_bytes += stop - start
    start, stop = range_of_values(item, start, stop)
    load.read_bytes += stop - start
    load.reads += 1
    load.files.add(item.file)
    return Segment(chunk.name, load.rank, item.file, item.offset + item.lead + start, item.offset + item.lead + stop)


def plan_writes(index: CheckpointIndex, ranks: list[RankLoad]) -> None:
    """What each rank would write: its rows of every tensor; scalars go to the rank with the least."""
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
