"""`ResumableStream`: batches of a data set in shards, from a position that all ranks share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from dcp_data.lanes import Lanes, default_lanes
from dcp_data.loader import ResumableLoader, SampleReader
from dcp_data.position import Position, with_digest
from dcp_data.shard_reading import ShardReader


class ResumableStream(Position):
    """Stream of samples from shards. Its position is saved once, and continues on any number of ranks and workers.

    Each epoch arranges the shards in a row by seed and epoch, and cuts the row into lanes, contiguous parts of equal
    length (± `chunk`). The stream takes `chunk` samples from each lane in turn, shuffled in blocks of `shuffle_buffer`.
    So no sample is repeated or omitted, however unequal the shards are. Each step consumes `global_batch_size` samples,
    and each rank gets a slice of them.

    Shards with `__getitem__` and `__len__` are indexed. Others are read from the beginning, or from `iter_from(offset)`
    if they have it, and unwanted samples are skipped: where a lane begins inside a shard, after a resume, and where
    workers share a lane. A worker has its own lanes if the number of ranks × `micro_batches` divides
    `global_batch_size` / `chunk`, and `lanes` × `chunk` is a multiple of `global_batch_size` × workers.

    Args:
        shards: Sequence of shards, or function from number to shard. A shard is an iterable of samples, or a function
            that returns one. It must give the same samples each time.
        global_batch_size: Samples per optimizer step, over all ranks.
        lengths: Samples per shard; by default `len` per shard.
        transform: Function from a sample to what is collated; not called for skipped samples.
        shuffle: Use another order of the shards in each epoch.
        shuffle_buffer: Samples of a lane that are shuffled together. Unless the shard can be indexed, each lane keeps
            up to as many in memory and reads them again after a resume.
        lanes: Number of lanes. By default, `lanes` and `chunk` give workers their own lanes where possible, with at
            most 192 lanes and no more than shards. A saved position replaces defaults.
        chunk: Samples per turn of a lane.
        seed: Seed of the order.
        micro_batches: See `ResumableSampler`, also for the next three arguments.
        drop_last: Skip an incomplete last global batch.
        rank: This rank among the ranks that share the data.
        world_size: Number of these ranks. Pass both or neither.

    Raises:
        TypeError: A shard has no length, and `lengths` is not given.

    Ranks: Each rank creates its own; nothing is communicated.

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
        """Return a loader of this rank's batches, which counts them; arguments as for `ResumableSampler.loader`.

        Raises:
            TypeError: The stream decides an option, such as `batch_size`.
        """
        shards = ShardReader(self._shards, self._lengths, self._transform)
        reader = SampleReader(shards, collate_fn, seed_samples=seed_samples)
        return ResumableLoader(self, self, reader, self._progress, self._parts, options)

    def load_state_dict(self, state_dict: Mapping[str, int | str]) -> None:
        """Continue from a saved position, on any number of ranks, with any `global_batch_size`.

        The saved seed replaces this object's, and so do the saved lanes if none were passed.

        Raises:
            ValueError: The position is inside an epoch, and the shards or the order's settings differ. Nothing changes.
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
            "order": with_digest(
                "shuffled/1" if self._lanes.shuffle else "sequential",
                "lengths",
                torch.tensor(self._lengths, dtype=torch.int64, device="cpu"),
            ),
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
