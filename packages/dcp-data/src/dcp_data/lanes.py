"""Arithmetic of lanes: which sample of which shard is at which position of a stream, for any number of readers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from dcp_data.permutation import Permutation

__all__ = ["Block", "Lanes", "Layout", "default_lanes"]

_UNITS_OF_A_STEP = 16
_STEPS_IN_TURN = (12, 4, 2, 1)
"""Steps before a lane has its turn again, from the best on: 12 is a multiple of 1, 2, 3 and 4 workers."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """How the samples of an epoch are divided: lanes are read side by side, in turn, `chunk` samples of each."""

    count: int
    chunk: int
    shuffle_buffer: int
    shuffle: bool


@dataclass(frozen=True, slots=True)
class Block:
    """Samples of a lane that are shuffled among themselves: places `start` to `stop` − 1 in the row of all shards."""

    lane: int
    number: int
    start: int
    stop: int


class Layout:
    """Arrangement of one epoch: the shards stand in a row, in a shuffled order, and the row is cut into lanes.

    Each lane is a contiguous part of the row, so that a lane may begin in the middle of a shard. All lanes end within
    the same round: their lengths differ by at most `chunk`.

    Args:
        lengths: Samples of each shard.
        lanes: Division into lanes.
        seed: Seed of the stream.
        epoch: Number of the epoch.
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
        """Return the block of a position of the epoch, and the number of the position among those of the block."""
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
        """Return the order of a block: the place in the row for each of its positions."""
        count = block.stop - block.start
        numbers = torch.arange(count, device="cpu")
        if self._lanes.shuffle_buffer > 1:
            numbers = Permutation(count, "block", *self._labels, block.lane, block.number).take(numbers)
        found: list[int] = (numbers + block.start).tolist()
        return found

    def shard_at(self, place: int) -> tuple[int, int]:
        """Return the shard of a place in the row, and the number of the sample in it."""
        index = bisect_right(self.ends, place)
        return self.shards[index], place - (self.ends[index - 1] if index else 0)

    def _lane_start(self, lane: int) -> int:
        chunk = self._lanes.chunk
        return lane * self._rounds * chunk + min(self._rest, lane * chunk)


def default_lanes(global_batch_size: int, shards: int) -> tuple[int, int]:
    """Return the number of lanes and the chunk for a stream.

    A global batch is made of chunks of as many lanes as divide it, up to 16 and up to the number of shards; there are
    12 times as many lanes if there are as many shards. So each worker has lanes of its own where the ranks divide those
    of a step, and the workers 12.
    """
    units = max(
        each for each in range(1, _UNITS_OF_A_STEP + 1) if global_batch_size % each == 0 and each <= max(1, shards)
    )
    turns = max(each for each in _STEPS_IN_TURN if units * each <= max(1, shards, units))
    return units * turns, global_batch_size // units
