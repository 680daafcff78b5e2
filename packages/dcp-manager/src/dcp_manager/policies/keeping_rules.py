"""Policies for keeping checkpoints, combined with `|`. They read records and remove nothing.

Whatever they say, a manager keeps the good checkpoint that was made last, and what is being read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dcp_manager.root.records import CheckpointRecord, by_creation

__all__ = ["KeepAll", "KeepAny", "KeepBest", "KeepEvery", "KeepFor", "KeepLast", "KeepPolicy", "keeps_all"]


class KeepPolicy(ABC):
    """Policy that selects which checkpoints to keep."""

    @abstractmethod
    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the steps to keep.

        Args:
            records: Of all good checkpoints, in the order in which they were made: not always that of their steps,
                since training may go back to an earlier one.
            now_seconds: Since the epoch.
        """

    def __or__(self, other: KeepPolicy) -> KeepAny:
        return KeepAny((*_parts(self), *_parts(other)))


def _parts(policy: KeepPolicy) -> tuple[KeepPolicy, ...]:
    return policy.policies if isinstance(policy, KeepAny) else (policy,)


@dataclass(frozen=True, slots=True)
class KeepAny(KeepPolicy):
    """Keeps a checkpoint if any of several policies keeps it."""

    policies: tuple[KeepPolicy, ...]

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """See `KeepPolicy`."""
        return set().union(*(policy.keep(records, now_seconds) for policy in self.policies))


@dataclass(frozen=True, slots=True)
class KeepAll(KeepPolicy):
    """Keeps everything."""

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """See `KeepPolicy`."""
        del now_seconds
        return {record.step for record in records}


def keeps_all(policy: KeepPolicy) -> bool:
    """Whether a policy keeps every checkpoint in any case, so that listing them is unnecessary."""
    return any(isinstance(part, KeepAll) for part in _parts(policy))


@dataclass(frozen=True, slots=True)
class KeepLast(KeepPolicy):
    """Keeps the `count` newest checkpoints by creation time, whatever their steps."""

    count: int

    def __post_init__(self) -> None:
        _check(self.count >= 1, f"KeepLast({self.count}): keep at least one")

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """See `KeepPolicy`."""
        del now_seconds
        return {record.step for record in by_creation(records)[-self.count :]}


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """Keeps the best `count` checkpoints by a metric; the newer wins a tie.

    Without the metric or with NaN, one is not kept.

    Args:
        count: How many.
        metric: Its name in the `metrics` of a save.
        mode: `min` if less is better, `max` if more is.
    """

    count: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _check(self.count >= 1, f"KeepBest({self.count}): keep at least one")
        _check(self.mode in ("min", "max"), f"KeepBest: mode is {self.mode!r}; choose 'min' or 'max'")

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """See `KeepPolicy`."""
        del now_seconds
        sign = 1 if self.mode == "min" else -1
        found = [
            (sign * record.metrics[self.metric], -record.created_seconds, -record.step, record.step)
            for record in records
            if not math.isnan(record.metrics.get(self.metric, math.nan))
        ]
        return {step for *_, step in sorted(found)[: self.count]}


@dataclass(frozen=True, slots=True)
class KeepEvery(KeepPolicy):
    """Keeps each checkpoint whose step is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _check(self.steps >= 1, f"KeepEvery({self.steps}): a number of steps is at least 1")

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """See `KeepPolicy`."""
        del now_seconds
        return {record.step for record in records if record.step % self.steps == 0}


@dataclass(frozen=True, slots=True)
class KeepFor(KeepPolicy):
    """Keeps each checkpoint for `seconds` after its creation."""

    seconds: float

    def __post_init__(self) -> None:
        _check(self.seconds > 0, f"KeepFor({self.seconds}): a time is more than 0")

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """See `KeepPolicy`."""
        return {record.step for record in records if now_seconds - record.created_seconds < self.seconds}


def _check(right: bool, message: str) -> None:
    if not right:
        raise ValueError(message)
