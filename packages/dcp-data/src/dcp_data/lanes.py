"""Map positions of a stream to samples of shards, for any number of readers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from dcp_data.permutation import Permutation

_UNITS_OF_A_STEP = 16
_STEPS_IN_TURN = (12, 4, 2, 1)
"""Steps until a lane has its turn again, best first: 12 is a multiple of 1, 2, 3 and 4 workers."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Division of an epoch into lanes. Readers take `chunk` samples from each lane in turn."""

    count: int
    chunk: int
    shuffle_buffer: int
    shuffle: bool


@dataclass(frozen=True, slots=True)
class Block:
    """Samples [start, stop) in the row of all shards, shuffled together."""

    lane: int
    number: int
    start: int
    stop: int


class Layout:
    """One epoch's layout: a row of shards, shuffled if `lanes.shuffle`, cut into contiguous lanes.

    A lane may begin inside a shard. Lane lengths differ by at most `chunk`.
    """

    def __init__(self, lengths: Sequence[int], lanes: Lanes, seed: int, epoch: int) -> None:
        numbers = torch.arange(len(lengths), device="cpu")
        order = Permutation(len(lengths), "shards", seed, epoch).take(numbers) if lanes.shuffle else numbers
        self.shards: list[int] = order.tolist()
        self.ends = [*accumulate(lengths[shard] for shard in self.shards)]
        self.length = self.ends[-1] if self.ends else 0
        self._lanes = lanes
        self._labels = (seed, epoch)
        self._rounds, self._rest = divmod(self.length, lanes.count * lanes.chunk)

    def block_of(self, position: int) -> tuple[Block, int]:
        """Return a position's block and the index in it."""
        lanes = self._lanes
        unit, inside = divmod(position, lanes.chunk)
        turn, lane = divmod(unit, lanes.count)
        offset = turn * lanes.chunk + inside
        size = max(1, lanes.shuffle_buffer)
        shift = size * lane // lanes.count  # so that not all lanes begin a block in the same step
        number = (offset + shift) // size
        first = max(0, number * size - shift)
        last = min((number + 1) * size - shift, self._lane_start(lane + 1) - self._lane_start(lane))
        start = self._lane_start(lane)
        return Block(lane, number, start + first, start + last), offset - first

    def order_in(self, block: Block) -> list[int]:
        """Return the row index of each position."""
        count = block.stop - block.start
        numbers = torch.arange(count, device="cpu")
        if self._lanes.shuffle_buffer > 1:
            numbers = Permutation(count, "block", *self._labels, block.lane, block.number).take(numbers)
        found: list[int] = (numbers + block.start).tolist()
        return found

    def shard_at(self, place: int) -> tuple[int, int]:
        """Return a row index's shard and the index in it."""
        index = bisect_right(self.ends, place)
        return self.shards[index], place - (self.ends[index - 1] if index else 0)

    def _lane_start(self, lane: int) -> int:
        chunk = self._lanes.chunk
        return lane * self._rounds * chunk + min(self._rest, lane * chunk)


def default_lanes(global_batch_size: int, shards: int) -> tuple[int, int]:
    """Return the number of lanes and the chunk.

    A step reads at most 16 lanes and not more than there are shards; their number divides the global batch size. With
    enough shards there are up to 12 times as many lanes, so that workers have separate lanes.
    """
    units = max(
        each for each in range(1, _UNITS_OF_A_STEP + 1) if global_batch_size % each == 0 and each <= max(1, shards)
    )
    turns = max(each for each in _STEPS_IN_TURN if units * each <= max(1, shards, units))
    return units * turns, global_batch_size // units
