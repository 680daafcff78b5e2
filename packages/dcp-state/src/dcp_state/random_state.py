"""State of the random number generators as a `Stateful`. The state differs between ranks: save it as `PerRank`."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["RandomState", "random_state_kept"]


class RandomState:
    """State of the random number generators of torch (CPU and current CUDA device), Python and, if imported, numpy.

    Source: torch `get_rng_state`, `torch.cuda.get_rng_state`; Python `random.getstate`; numpy `random.get_state`.

    Example:
        ```python
        from dcp_core import PerRank, load, save
        from dcp_state import RandomState

        state = {"random": PerRank(RandomState(), otherwise="modulo")}
        save(state, checkpoint_id="step-1")
        load(state, checkpoint_id="step-1")  # sets the generators
        ```
    """

    def state_dict(self) -> dict[str, Any]:
        """Return name (`torch`, `python`, `cuda`, `numpy`) → state of the generator, as tensors and plain values."""
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
        """Set the random number generators whose states `state_dict` has."""
        torch.set_rng_state(state_dict["torch"].to("cpu", torch.uint8))
        version, words, gauss = state_dict["python"]
        random.setstate((version, tuple(words), gauss))
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"].to("cpu", torch.uint8))
        if "numpy" in state_dict:
            numpy = importlib.import_module("numpy")  # no dependency: only where the saved run had it
            kind, keys, *rest = state_dict["numpy"]
            numpy.random.set_state((kind, numpy.array(keys, numpy.uint32), *rest))


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Context manager that restores the random number generators of torch, Python and numpy at its end.

    Args:
        device: Device whose torch generator is restored, besides the CPU's.
    """
    devices = [device] if device.type == "cuda" else []
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)
