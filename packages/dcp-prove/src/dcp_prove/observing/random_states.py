"""Fingerprints of the global random number generators of this process."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["CPU_RANDOM", "NUMPY_RANDOM", "PYTHON_RANDOM", "global_random_states"]

CPU_RANDOM = "torch.random"
NUMPY_RANDOM = "numpy.random"
PYTHON_RANDOM = "random"


def global_random_states() -> dict[str, Any]:
    """Return generator → state, without drawing; CUDA devices only if CUDA is in use."""
    states: dict[str, Any] = {CPU_RANDOM: torch.get_rng_state(), PYTHON_RANDOM: random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for number, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"torch.cuda.random[{number}]"] = state
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states[NUMPY_RANDOM] = numpy.random.get_state()
    return states
