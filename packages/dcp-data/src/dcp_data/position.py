"""`Position`: the place of a job in its data, counted in samples that all ranks together have consumed."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice

import torch
import torch.distributed as dist

from dcp_data.errors import PositionMismatchError
from dcp_data.lanes import Lanes
from dcp_data.parts import Part, Share, shares_of
from dcp_data.progress import Progress

__all__ = ["Position"]

_LOOKED_UP_TOGETHER = 16_384
"""Samples whose indices are computed in one call: each call takes about 0.4 ms and 70 ns for a sample."""


class Position(ABC):
    """Place in an epoch of samples: the base of `ResumableSampler` and `ResumableStream`, which say in which order.

    The state is equal on all ranks and independent of their number.

    Args:
        global_batch_size: Samples of one optimizer step of all ranks together.
        seed: Seed of the order.
        micro_batches: Batches of each rank for one step.
        drop_last: Leave out a last global batch that is not full.
        rank: This rank among those that share the data; by default that of the default process group.
        world_size: Number of those ranks; by default that of the default process group, or 1.
    """

    def __init__(
        self,
        global_batch_size: int,
        *,
        seed: int,
        micro_batches: int,
        drop_last: bool,
        rank: int | None,
        world_size: int | None,
    ) -> None:
        self.global_batch_size = _at_least(1, global_batch_size, "global_batch_size")
        self.micro_batches = _at_least(1, micro_batches, "micro_batches")
        self.drop_last = drop_last
        self.rank, self.world_size = _rank_of(rank, world_size)
        self._seed = operator.index(seed)
        self._progress = Progress()
        self._lanes: Lanes | None = None

    @abstractmethod
    def _settings(self) -> dict[str, int | str]:
        """Return what the order depends on beside seed and epoch; a saved position needs the same."""

    @abstractmethod
    def _length(self) -> int:
        """Return the number of samples of the current epoch."""

    @abstractmethod
    def _indices(self, positions: torch.Tensor) -> torch.Tensor:
        """Return what is loaded at positions of the current epoch."""

    @property
    def seed(self) -> int:
        """Seed of the order; `load_state_dict` replaces it with the saved one."""
        return self._seed

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self._progress.epoch

    @property
    def samples_in_epoch(self) -> int:
        """Samples of the current epoch that all ranks together have consumed, in whole steps."""
        return self._progress.samples

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch, wherever the position is."""
        whole, rest = divmod(self._length(), self.global_batch_size)
        return (whole + (rest > 0 and not self.drop_last)) * self.micro_batches

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. The number of the current epoch changes nothing: the position in it is kept."""
        if epoch != self.epoch:
            self._progress.move(_at_least(0, epoch, "epoch"), 0)

    def state_dict(self) -> dict[str, int | str]:
        """Return the position as numbers and strings that are equal on all ranks."""
        state = {"epoch": self.epoch, "samples_in_epoch": self.samples_in_epoch, "seed": self._seed}
        return {**state, **self._settings()}

    def load_state_dict(self, state_dict: Mapping[str, int | str]) -> None:
        """Continue from a saved position, on any number of ranks, with any `global_batch_size`.

        Args:
            state_dict: What `state_dict` returned. Its seed replaces this object's.

        Raises:
            PositionMismatchError: The position is in the middle of an epoch, and the data or the settings of the order
                are not those that were saved. Nothing is changed.
        """
        before = self.epoch, self.samples_in_epoch, self._seed
        epoch, samples, seed = (int(state_dict[name]) for name in ("epoch", "samples_in_epoch", "seed"))
        self._progress.move(epoch, samples)
        self._seed = seed
        try:
            if samples:
                self._compare(state_dict)
        except BaseException:
            self._progress.move(*before[:2])
            self._seed = before[2]
            raise

    def _compare(self, saved: Mapping[str, int | str]) -> None:
        different = [
            f"{name} was {saved.get(name)!r} and is {value!r}"
            for name, value in self._settings().items()
            if saved.get(name) != value
        ]
        if different:
            raise PositionMismatchError(
                f"the position was saved after {self.samples_in_epoch} samples of epoch {self.epoch}, of other data or "
                f"in another order: {'; '.join(different)}. Continue with the data and settings of the save, or leave "
                f"this value out of the load and call set_epoch({self.epoch + 1}) to begin the next epoch"
            )

    def _ended(self) -> bool:
        left = self._length() - self.samples_in_epoch
        return left <= 0 or (self.drop_last and left < self.global_batch_size)

    def _parts(self) -> Iterator[tuple[Part, Share]]:
        """Yield this rank's batches from the position to the end of the epoch."""
        shares = shares_of(
            self.samples_in_epoch,
            self._length(),
            global_batch_size=self.global_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            micro_batches=self.micro_batches,
            drop_last=self.drop_last,
        )
        size = -(-self.global_batch_size // (self.world_size * self.micro_batches))
        seed, epoch = self._seed, self.epoch
        while group := [*islice(shares, max(1, _LOOKED_UP_TOGETHER // size))]:
            positions = torch.cat([torch.arange(each.start, each.stop, device="cpu") for each in group])
            indices = iter(self._indices(positions).tolist())
            for share in group:
                taken = [*islice(indices, share.stop - share.start)]
                yield Part(seed, epoch, share.start, taken, self._lanes), share


def _at_least(least: int, value: int, name: str) -> int:
    if operator.index(value) < least:
        raise ValueError(f"{name}={value} is too small: it must be at least {least}")
    return value


def _rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank} and world_size={world_size} belong together: pass both, or neither")
    if rank is None or world_size is None:
        in_group = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if in_group else (0, 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not one of world_size={world_size} ranks: they are counted from 0")
    return rank, world_size
