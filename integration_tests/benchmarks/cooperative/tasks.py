"""`Task`: what the ranks of one run load and how; `Taken`: what it took them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["MIB", "Taken", "Task", "fill_state", "make_template"]

MIB = 1 << 20
_TENSORS = 16


@dataclass(frozen=True, slots=True)
class Task:
    """What all ranks of one run do.

    Attributes:
        place: Folder or address of the checkpoint.
        storage: `folder`, `throttled` (a folder behind a token bucket) or `objects` (an object store).
        mib: Size of the state, which every rank wants as a whole.
        rounds: Way of loading → counted rounds; one more warms up. Ways: see `ranks`.
        cold: Whether the page cache is emptied of the checkpoint before each load.
        bytes_per_second: Limit of a throttled folder for all ranks together.
        slow_bytes_per_second: Limit of the last rank alone; 0 for none.
        network: IP network between the hosts, for connections between ranks; empty for the default.
    """

    place: str
    storage: str
    mib: float
    rounds: Mapping[str, int]
    cold: bool = False
    bytes_per_second: float = 0.0
    slow_bytes_per_second: float = 0.0
    network: str = ""


@dataclass(slots=True)
class Taken:
    """What one way of loading took, of each counted round.

    Attributes:
        seconds: From the barrier before the load until the last rank has its last tensor.
        cpu_seconds: Processor time of all ranks.
        read: Bytes that the ranks took from the storage ÷ bytes of the state; 0 where nobody counts.
        slow_read: The same of the last rank.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    slow_read: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)

    def ratio(self, other: Taken, column: str = "seconds") -> float:
        """Median of the quotients of two times of one round."""
        quotients = (one / two for one, two in zip(getattr(self, column), getattr(other, column), strict=False))
        return float(statistics.median(quotients))

    @classmethod
    def of(cls, rounds: Sequence[Sequence[tuple[float, float, float, float]]], state_bytes: float) -> Taken:
        """Put together what the ranks say: of each round, of each rank, begin, end, processor time and bytes read."""
        taken = cls()
        for ranks in rounds:
            begin, end, cpu, read = zip(*ranks, strict=True)
            taken.seconds.append(max(end) - min(begin))
            taken.cpu_seconds.append(sum(cpu))
            taken.read.append(sum(read) / state_bytes)
            taken.slow_read.append(read[-1] / state_bytes)
        return taken


def make_template(mib: float) -> dict[str, torch.Tensor]:
    """Return tensors of the state's shapes, whose pages exist."""
    return {f"layers.{n}.weight": torch.zeros(int(mib * MIB / _TENSORS / 4)) for n in range(_TENSORS)}


def fill_state(mib: float) -> dict[str, torch.Tensor]:
    """Return the state that is saved: values that do not compress, different in each tensor."""
    generator = torch.Generator().manual_seed(3)
    return {name: value.normal_(generator=generator) for name, value in make_template(mib).items()}
