"""Our library and PyTorch's own, behind one pair of functions, and how the demo times them.

This is the one module of the demo that imports `torch.distributed.checkpoint`: as a rival to measure.
"""

from __future__ import annotations

import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as stock

import dcp_all as ours

__all__ = ["LIBRARIES", "ROUNDS", "Library", "Times", "bytes_of", "time_loads", "time_saves"]

ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Library:
    """A name and the two functions that users call."""

    name: str
    save: Callable[..., Any]
    load: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Times:
    """Median seconds of one library for one operation, and the bytes of the checkpoint's files."""

    library: str
    seconds: float
    checkpoint_bytes: int


LIBRARIES = (
    Library("ours", ours.save, ours.load),
    Library("stock", stock.save, stock.load),  # type: ignore[attr-defined]
)


def time_saves(state: dict[str, Any], folder: Path) -> list[Times]:
    """Save with each library in turn, each time into a new folder; the last one is kept.

    Ranks: every rank; collective.
    """
    return _time(lambda library: library.save, state, folder, fresh=True)


def time_loads(state: dict[str, Any], folder: Path) -> list[Times]:
    """Load in place what `time_saves` left, with each library in turn.

    Ranks: every rank; collective.
    """
    return _time(lambda library: library.load, state, folder, fresh=False)


def bytes_of(checkpoint: Path) -> int:
    """The bytes of all files of a checkpoint."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def _time(
    pick: Callable[[Library], Callable[..., Any]], state: dict[str, Any], folder: Path, *, fresh: bool
) -> list[Times]:
    seconds: dict[str, list[float]] = {library.name: [] for library in LIBRARIES}
    for turn in range(1 + ROUNDS):  # the first one warms up, and who comes first alternates
        for library in LIBRARIES if turn % 2 == 0 else reversed(LIBRARIES):
            checkpoint = folder / library.name
            if fresh and dist.get_rank() == 0:
                shutil.rmtree(checkpoint, ignore_errors=True)
            took = _seconds(pick(library), state, checkpoint)
            if turn > 0:
                seconds[library.name].append(took)
    return [Times(name, statistics.median(each), bytes_of(folder / name)) for name, each in seconds.items()]


def _seconds(operation: Callable[..., Any], state: dict[str, Any], checkpoint: Path) -> float:
    """Wall time until every rank is done."""
    dist.barrier()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operation(state, checkpoint_id=checkpoint)
    dist.barrier()
    return time.perf_counter() - start
