"""`ResumableStream`: batches of a data set in shards that are read from begin to end, from a position for all ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from dcp_data.lanes import Lanes, default_lanes
from dcp_data.loader import ResumableLoader, SampleReader
from dcp_data.position import Position
from dcp_data.shard_reading import ShardReader

__all__ = ["ResumableStream"]


class ResumableStream(Position):
    """Stream of samples from shards whose position is saved once, and continues on any number of ranks and workers.

    In each epoch the shards stand in a row, in an order that depends on seed and epoch. The row is cut into lanes,
    contiguous parts of equal length (± `chunk`); the stream takes `chunk` samples from each lane in turn. The samples
    of a lane are shuffled in blocks of `shuffle_buffer`. So a sample's place follows from its position alone, and no
    sample is repeated or left out, however unequal the shards are. Step by step all ranks together consume
    `global_batch_size` samples, of which each rank gets a slice.

    A shard that can be indexed (`__getitem__`, `__len__`) is. Any other is read from its beginning, or from
    `iter_from(offset)` if it has such a method, and what is not wanted is skipped: that happens where a lane begins in
    the middle of a shard, after a resume, and where workers share a lane. A worker has lanes of its own if the number
    of ranks × `micro_batches` divides `global_batch_size` / `chunk`, and
    `lanes` × `chunk` is a multiple of `global_batch_size` × workers.

    Args:
        shards: Sequence of shards, or function from a shard's number to the shard. A shard is an iterable of samples,
            or a function without arguments that returns one. It must give the same samples each time.
        global_batch_size: Samples of one optimizer step of all ranks together.
        lengths: Samples of each shard; by default `len` of each shard. For shards whose length nothing says, count them
            once and store the numbers.
        transform: Function from a sample to what is collated; not called for samples that are skipped.
        shuffle: Use another order of the shards in each epoch.
        shuffle_buffer: Samples of a lane that are shuffled among themselves. Up to as many are kept in memory for each
            lane, and read again after a resume, unless the shard can be indexed.
        lanes: Number of lanes; with `chunk`, by default so that workers have lanes of their own where possible, with
            at most 192 lanes and no more than shards. A saved position replaces defaults.
        chunk: Samples that are taken from a lane before it is the next one's turn.
        seed: Seed of the order.
        micro_batches: Batches of each rank for one step: the steps of gradient accumulation.
        drop_last: Leave out a last global batch that is not full. Otherwise it is cut into smaller parts; nothing is
            padded, see `ResumableLoader.weight`.
        rank: This rank among those that share the data; by default that of the default process group.
        world_size: Number of those ranks; by default that of the default process group, or 1.

    Raises:
        TypeError: A shard has no length, and `lengths` is not given.
        ValueError: Arguments are out of range or do not go together.

    Ranks: Each rank makes its own; nothing is communicated.

    Example:
        ```python
        from dcp_data import ResumableStream


        def read(shard):  # lines of a file, say
            yield from range(10 * shard, 10 * shard + 10)


        stream = ResumableStream(read, 6, lengths=[10] * 4, shuffle_buffer=5, rank=0, world_size=1)
        seen = []
        for batch in stream.loader():
            seen += batch.tolist()
            if stream.samples_in_epoch == 18:
                break

        resumed = ResumableStream(read, 6, lengths=[10] * 4, shuffle_buffer=5, rank=0, world_size=1)
        resumed.load_state_dict(stream.state_dict())
        for batch in resumed.loader(num_workers=2):
            seen += batch.tolist()
        assert sorted(seen) == list(range(40))
        ```
    """

    def __init__(
        self,
        shards: Sequence[Any] | Callable[[int], Any],
        global_batch_size: int,
        *,
        lengths: Sequence[int] | None = None,
        transform: Callable[[Any], Any] | None = None,
        shuffle: bool = True,
        shuffle_buffer: int = 0,
        lanes: int | None = None,
        chunk: int | None = None,
        seed: int = 0,
        micro_batches: int = 1,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(
            global_batch_size,
            seed=seed,
            micro_batches=micro_batches,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        if (lanes is None) != (chunk is None):
            raise ValueError(f"lanes={lanes} and chunk={chunk} belong together: pass both, or neither")
        self._shards = shards
        self._lengths = _lengths_of(shards, lengths)
        self._total = sum(self._lengths)
        self._transform = transform
        self._has_default_lanes = lanes is None
        if lanes is None or chunk is None:
            lanes, chunk = default_lanes(global_batch_size, sum(length > 0 for length in self._lengths))
        if min(lanes, chunk) < 1 or shuffle_buffer < 0:
            raise ValueError(
                f"lanes={lanes} and chunk={chunk} must be at least 1, and shuffle_buffer={shuffle_buffer} at least 0"
            )
        self._lanes: Lanes = Lanes(lanes, chunk, shuffle_buffer, shuffle)

    def loader(
        self,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        seed_samples: bool = True,
        **options: Any,
    ) -> ResumableLoader:
        """Return a loader of this rank's batches, which counts them as it hands them out.

        Args:
            collate_fn: Function from a list of samples to a batch.
            seed_samples: Seed the random generators of torch (CPU), Python and numpy for each sample by seed, epoch and
                position, so that a random `transform` is the same on any number of ranks and workers. It takes some
                20 µs for each sample; the generators of the trainer stay as they are.
            options: More arguments of `torch.utils.data.DataLoader`, such as `num_workers` or `pin_memory`.

        Raises:
            TypeError: An option is decided by the stream, such as `batch_size`.
        """
        shards = ShardReader(self._shards, self._lengths, self._transform)
        reader = SampleReader(shards, collate_fn, seed_samples=seed_samples)
        return ResumableLoader(self, self, reader, self._progress, self._parts, options)

    def load_state_dict(self, state_dict: Mapping[str, int | str]) -> None:
        """Continue from a saved position, on any number of ranks, with any `global_batch_size`.

        Args:
            state_dict: What `state_dict` returned. Its seed replaces this object's, and so do its lanes if none were
                passed.

        Raises:
            PositionMismatchError: The position is in the middle of an epoch, and the shards or the settings of the
                order are not those that were saved. Nothing is changed.
        """
        before = self._lanes
        if self._has_default_lanes:
            count, chunk = int(state_dict["lanes"]), int(state_dict["chunk"])
            self._lanes = Lanes(count, chunk, before.shuffle_buffer, before.shuffle)
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self._lanes = before
            raise

    def _settings(self) -> dict[str, int | str]:
        return {
            "shards": len(self._lengths),
            "samples_per_epoch": self._total,
            "lanes": self._lanes.count,
            "chunk": self._lanes.chunk,
            "shuffle_buffer": self._lanes.shuffle_buffer,
            "order": "shuffled/1" if self._lanes.shuffle else "sequential",
        }

    def _length(self) -> int:
        return self._total

    def _indices(self, positions: torch.Tensor) -> torch.Tensor:
        return positions  # workers find the samples


def _lengths_of(shards: Sequence[Any] | Callable[[int], Any], lengths: Sequence[int] | None) -> list[int]:
    if lengths is None:
        if callable(shards):
            raise TypeError("lengths= is missing: a function of shards does not say how many there are")
        missing = [number for number, shard in enumerate(shards) if not hasattr(shard, "__len__")]
        if missing:
            raise TypeError(
                f"shard {missing[0]} has no length (of {len(missing)} such shards): pass lengths=, the number of "
                "samples of each shard. Count them once, and store the numbers"
            )
        lengths = [len(shard) for shard in shards]
    elif not callable(shards) and len(shards) != len(lengths):
        raise ValueError(f"there are {len(shards)} shards, but {len(lengths)} lengths")
    checked = [operator.index(length) for length in lengths]
    if min(checked, default=0) < 0:
        raise ValueError(f"shard {checked.index(min(checked))} has a negative length: {min(checked)}")
    return checked
