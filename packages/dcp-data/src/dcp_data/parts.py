"""Parts of global batches: which positions of an epoch a rank trains on, in how many batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dcp_data.lanes import Lanes

__all__ = ["Part", "Share", "shares_of"]


@dataclass(frozen=True, slots=True)
class Share:
    """Positions of one batch of one rank within an epoch, `start` to `stop` − 1."""

    start: int
    stop: int
    weight: float
    """Factor for the mean loss of the batch, see `ResumableLoader.weight`; 0 if its one sample is another batch's."""
    step_end: int | None
    """Samples of the epoch that all ranks have consumed after this batch; None if the step has further batches."""


@dataclass(frozen=True, slots=True)
class Part:
    """One batch of one rank as workers get it: the elements to load."""

    seed: int
    epoch: int
    start: int
    """Position of the first element within the epoch; the others follow."""
    indices: list[int]
    lanes: Lanes | None = None
    """Division of a stream into lanes; None for a sampler."""


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
    """Yield the batches of one rank for the rest of an epoch, `micro_batches` for each step.

    A global batch is cut into `world_size` × `micro_batches` parts of equal size (±1), in the order of the ranks, and
    those of a rank in the order of its batches. If there are fewer samples than parts at the end of an epoch, a part
    without a sample gets one of its neighbours' with weight 0: all ranks take the same number of steps.

    Args:
        consumed: Samples of the epoch that all ranks together have consumed.
        length: Samples of the epoch.
        global_batch_size: Samples of one step of all ranks.
        rank: This rank.
        world_size: Number of ranks.
        micro_batches: Batches of each rank for one step.
        drop_last: Leave out a last global batch that is not full.
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
