"""Divide global batches into batches per rank, also an epoch's last one, which may not fill all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dcp_data.lanes import Lanes


@dataclass(frozen=True, slots=True)
class Share:
    """Positions [start, stop) of an epoch: one batch of one rank."""

    start: int
    stop: int
    weight: float
    """See `ResumableLoader.weight`; 0 if its only sample belongs to another batch."""
    step_end: int | None
    """Samples that all ranks have consumed after this batch; None inside a step."""


@dataclass(frozen=True, slots=True)
class Part:
    """One batch of one rank, as workers receive it."""

    seed: int
    epoch: int
    start: int
    """First position in the epoch."""
    indices: list[int]
    lanes: Lanes | None = None
    """None for a sampler."""


def shares_of(
    consumed: int,
    length: int,
    *,
    global_batch_size: int,
    rank: int,
    world_size: int,
    micro_batches: int,
    drop_last: bool,
) -> Iterator[Share]:
    """Yield one rank's batches for the rest of an epoch.

    A global batch is cut into `world_size` × `micro_batches` parts of equal size (±1), ordered by rank, then batch. At
    an epoch's end, a part without samples gets a neighbour's sample with weight 0.
    """
    parts = world_size * micro_batches
    while consumed < length:
        end = min(consumed + global_batch_size, length)
        samples = end - consumed
        if drop_last and samples < global_batch_size:
            return
        for part in range(rank * micro_batches, (rank + 1) * micro_batches):
            start, stop = consumed + samples * part // parts, consumed + samples * (part + 1) // parts
            step_end = end if part == (rank + 1) * micro_batches - 1 else None
            yield Share(start, max(stop, start + 1), (stop - start) * world_size / samples, step_end)
        consumed = end
