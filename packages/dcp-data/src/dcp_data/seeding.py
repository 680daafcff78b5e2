"""Random numbers of data sets: a seed for each sample, so that no state of a generator has to be saved."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Iterator

import torch

__all__ = ["generators_kept", "seed_generators"]


def seed_generators(seed: int) -> None:
    """Seed the generators of torch (CPU), Python and, if imported, numpy, with 63 bits."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        importlib.import_module("numpy").random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Context manager that restores these generators at its end."""
    numpy = importlib.import_module("numpy") if "numpy" in sys.modules else None
    of_torch, of_python = torch.default_generator.get_state(), random.getstate()
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
