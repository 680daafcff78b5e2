"""Fingerprints of the global random number generators of this process."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from dcp_core.tensors.devices import accelerator

CPU_RANDOM = "torch.random"
NUMPY_RANDOM = "numpy.random"
PYTHON_RANDOM = "random"


def global_random_states() -> dict[str, Any]:
    """Return generator → state, without drawing; and of an accelerator only if it is in use."""
    states: dict[str, Any] = {CPU_RANDOM: torch.get_rng_state(), PYTHON_RANDOM: random.getstate()}
    module = accelerator()
    if module is not None:
        for number in range(module.device_count()):
            states[f"{module.__name__}.random[{number}]"] = module.get_rng_state(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states[NUMPY_RANDOM] = numpy.random.get_state()
    return states
