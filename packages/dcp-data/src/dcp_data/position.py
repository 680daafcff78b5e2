"""A job's position in its data, in samples consumed by all ranks."""

from __future__ import annotations

import ctypes
import hashlib
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice

import torch
import torch.distributed as dist

from dcp_data.lanes import Lanes
from dcp_data.progress import Progress
from dcp_data.rank_batches import Part, Share, shares_of

_LOOKED_UP_TOGETHER = 16_384
"""Samples per lookup, which takes about 0.4 ms and 70 ns per sample."""
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables of launchers: torchrun, and two of MPI. Those of Slurm also describe allocations."""
_OF = " of "
"""Precedes the digest of an order's numbers."""


class Position(ABC):
    """Base of `ResumableSampler` and `ResumableStream`: a position in an epoch.

    The state is equal on all ranks and independent of the world size.
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
        self._given_rank = _checked_rank(rank, world_size)
        self._seed = operator.index(seed)
        self._progress = Progress()
        self._lanes: Lanes | None = None

    @abstractmethod
    def _settings(self) -> dict[str, int | str]:
        """Return the settings that must match on resume."""

    @abstractmethod
    def _length(self) -> int:
        """Return the samples in the current epoch."""

    @abstractmethod
    def _indices(self, positions: torch.Tensor) -> torch.Tensor:
        """Map positions of the current epoch to indices."""

    @property
    def rank(self) -> int:
        """This rank. Raises like `world_size`."""
        return self._ranks()[0]

    @property
    def world_size(self) -> int:
        """Number of the ranks that share the data.

        Raises:
            RuntimeError: The launcher started several processes, but the process group does not exist yet.
        """
        return self._ranks()[1]

    @property
    def seed(self) -> int:
        """Seed of the order; `load_state_dict` replaces it with the saved one."""
        return self._seed

    @property
    def epoch(self) -> int:
        """Current epoch, from 0."""
        return self._progress.epoch

    @property
    def samples_in_epoch(self) -> int:
        """Samples that all ranks have consumed in this epoch, in whole steps."""
        return self._progress.samples

    def __len__(self) -> int:
        """Return this rank's batches per whole epoch."""
        whole, rest = divmod(self._length(), self.global_batch_size)
        return (whole + (rest > 0 and not self.drop_last)) * self.micro_batches

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Passing the current epoch keeps the position."""
        if epoch != self.epoch:
            self._progress.move(_at_least(0, epoch, "epoch"), 0)

    def state_dict(self) -> dict[str, int | str]:
        """Return the position, equal on all ranks."""
        state = {"epoch": self.epoch, "samples_in_epoch": self.samples_in_epoch, "seed": self._seed}
        return {**state, **self._settings()}

    def load_state_dict(self, state_dict: Mapping[str, int | str]) -> None:
        """Continue from a saved position, on any number of ranks, with any `global_batch_size`.

        Raises:
            ValueError: The position is inside an epoch, and the data or order differ from the save. Nothing changes.
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
            if saved.get(name) not in (value, str(value).partition(_OF)[0])  # older states have no digests
        ]
        if different:
            raise ValueError(
                f"the position was saved after {self.samples_in_epoch} samples of epoch {self.epoch}, of other data or "
                f"in another order: {'; '.join(different)}. Continue with the data and settings of the save, or leave "
                f"this value out of the load and call set_epoch({self.epoch + 1}) to begin the next epoch"
            )

    def _ended(self) -> bool:
        left = self._length() - self.samples_in_epoch
        return left <= 0 or (self.drop_last and left < self.global_batch_size)

    def _ranks(self) -> tuple[int, int]:
        if self._given_rank is not None:
            return self._given_rank
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        name = next((name for name in _SIZES if name in os.environ), "")
        launched = os.environ.get(name, "").strip()
        if launched.isdecimal() and int(launched) > 1:
            raise RuntimeError(
                f"this process is one of {launched} ({name}), but there is no process group, so that each of them "
                "would train on all samples: call torch.distributed.init_process_group() before batches are drawn, or "
                "pass rank= and world_size= (rank=0, world_size=1 for a process that trains alone)"
            )
        return 0, 1

    def _parts(self) -> Iterator[tuple[Part, Share]]:
        rank, world_size = self._ranks()
        shares = shares_of(
            self.samples_in_epoch,
            self._length(),
            global_batch_size=self.global_batch_size,
            rank=rank,
            world_size=world_size,
            micro_batches=self.micro_batches,
            drop_last=self.drop_last,
        )
        size = -(-self.global_batch_size // (world_size * self.micro_batches))
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


def _checked_rank(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ValueError(f"rank={rank} and world_size={world_size} belong together: pass both, or neither")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not one of world_size={world_size} ranks: they are counted from 0")
    return rank, world_size


def with_digest(order: str, what: str, numbers: torch.Tensor) -> str:
    """Append a digest of `numbers` to an order's name, to compare on resume."""
    numbers = numbers.contiguous()
    data = (ctypes.c_char * numbers.nbytes).from_address(numbers.data_ptr()) if numbers.nbytes else b""  # no numpy here
    digest = hashlib.blake2b(data, digest_size=6).hexdigest()
    return f"{order}{_OF}{what} {digest}"
