"""State that differs between ranks: random number generators, data loaders. Kept under names that carry the rank.

The rule for another world size: rank r takes what rank r saved. Of more saved ranks than there are now, the rest is not
read. Fewer saved ranks than now must be told (`saved_ranks`): the ranks beyond keep the state that they have.
"""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch
import torch.distributed as dist

from dcp_core.protocols import Stateful

__all__ = ["PerRank", "RandomState"]


class PerRank:
    """Any `Stateful` with a state of its own on each rank.

    Args:
        stateful: Gives and takes the state of this rank: a data loader, a sampler, a `RandomState`.
        rank: This rank; None asks the default process group. With data parallelism, the rank in that dimension may be
            what data loaders differ by.
        saved_ranks: How many ranks saved the checkpoint that is to be loaded; needed only where that were fewer.
    """

    def __init__(self, stateful: Stateful, *, rank: int | None = None, saved_ranks: int | None = None) -> None:
        self._stateful = stateful
        self._rank = rank
        self._saved_ranks = saved_ranks

    @property
    def name(self) -> str:
        """The name of this rank's state."""
        rank = self._rank
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
        return f"rank_{rank}"

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank as one value, whatever it is made of; nothing on ranks beyond `saved_ranks`."""
        if self._beyond():
            return {}
        return {self.name: (self._stateful.state_dict(),)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of this rank, if it is there."""
        if self.name in state_dict:
            self._stateful.load_state_dict(state_dict[self.name][0])

    def _beyond(self) -> bool:
        return self._saved_ranks is not None and int(self.name.removeprefix("rank_")) >= self._saved_ranks


class RandomState:
    """The generators of torch (CPU and the current CUDA device), Python and, where it is imported, numpy.

    Source: torch `get_rng_state`, `torch.cuda.get_rng_state`; Python `random.getstate`; numpy `random.get_state`.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states, as tensors and plain values."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(words), gauss]}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, *rest = numpy.random.get_state()
            state["numpy"] = [str(kind), [int(key) for key in keys], *rest]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators whose states are there."""
        torch.set_rng_state(state_dict["torch"].to("cpu", torch.uint8))
        version, words, gauss = state_dict["python"]
        random.setstate((version, tuple(words), gauss))
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"].to("cpu", torch.uint8))
        if "numpy" in state_dict:
            numpy = importlib.import_module("numpy")  # no dependency: only where the saved run had it
            kind, keys, *rest = state_dict["numpy"]
            numpy.random.set_state((kind, numpy.array(keys, numpy.uint32), *rest))
