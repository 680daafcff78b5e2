"""Parts that several loops share: a sampler that resumes inside an epoch, augmentation, and random states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Sampler

import dcp_all as dcp

__all__ = ["Buffers", "EpochSampler", "Images", "ranks", "seed_all", "state_of_generators", "wrapped"]


def ranks() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def wrapped(model: nn.Module) -> DistributedDataParallel:
    """The model under DDP, which sums alike and shares no buffers in the first step after a resume as in any other.

    Otherwise DDP sums in buckets of another order after its first step, which rounds otherwise on three ranks or more,
    and overwrites the buffers of a rank when it is made, even between two steps of the optimizer.
    """
    return DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)


class Buffers:
    """A rank's own buffers, restored after those of the model, which all ranks share: the tensors are the same."""

    def __init__(self, model: nn.Module) -> None:
        self.buffers = dict(model.named_buffers())

    def state_dict(self) -> dict[str, Any]:
        return {name: buffer.clone() for name, buffer in self.buffers.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, buffer in self.buffers.items():
            buffer.copy_(state_dict[name])


class EpochSampler(Sampler[int]):
    """A shuffle by seed and epoch, of which each rank reads every n-th index, from a position on."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.rank, self.world_size = ranks()
        self.epoch = 0
        self.position = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        yield from order.tolist()[self.rank :: self.world_size][self.position :]

    def __len__(self) -> int:
        return self.size // self.world_size - self.position


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Small images of noise with labels; augmented by epoch and index, or by the worker's random numbers."""

    def __init__(self, size: int, *, by_worker: bool) -> None:
        self.pixels = torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        self.by_worker = by_worker
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(1_000_000 * self.epoch + index)
        noise = torch.randn(3, 8, 8, generator=None if self.by_worker else generator)
        return self.pixels[index] + 0.1 * noise, index % 4


class _WithoutNumpy(dcp.RandomState):
    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "numpy"}


class _WithoutTorch(dcp.RandomState):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "torch": torch.get_rng_state()})


class _OfOneRank:
    """What a script does that saves the states of its generators itself: one object of the checkpoint for all ranks."""

    def state_dict(self) -> dict[str, Any]:
        return dcp.RandomState().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        dcp.RandomState().load_state_dict(state_dict)


def state_of_generators(omit: str | None) -> Any:
    """The random state of all ranks for `app_state`, without one part of it if `omit` names it."""
    if omit == "torch-rng":
        return dcp.PerRank(_WithoutTorch())
    if omit == "one-rank-rng":
        return _OfOneRank()
    return dcp.PerRank(_WithoutNumpy() if omit == "numpy-rng" else dcp.RandomState())


def seed_all(seed: int) -> None:
    """Seed torch, NumPy and Python, each rank with a seed of its own."""
    rank, _ = ranks()
    torch.manual_seed(seed + rank)
    np.random.seed(seed + rank)
    random.seed(seed + rank)
