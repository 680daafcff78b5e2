"""Policies for keeping checkpoints (retention), which can be combined with `|`. They select, and remove nothing.

Whatever the policies select, a manager also keeps the undamaged checkpoint that was made last, and checkpoints that a
process reads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

from dcp_io.roots.records import CheckpointRecord, by_creation

__all__ = ["KeepAll", "KeepAny", "KeepBest", "KeepEvery", "KeepFor", "KeepLast", "KeepPolicy", "keeps_all"]


class KeepPolicy(ABC):
    """Base class of policies that select the checkpoints to keep."""

    @abstractmethod
    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the steps of the checkpoints to keep.

        Args:
            records: Records of the checkpoints, in the order of their creation, which differs from the order of steps
                if training went back to an earlier step.
            now_seconds: Current time, in seconds since the epoch.
        """

    def __or__(self, other: KeepPolicy) -> KeepAny:
        return KeepAny((*_parts(self), *_parts(other)))


def _parts(policy: KeepPolicy) -> tuple[KeepPolicy, ...]:
    return policy.policies if isinstance(policy, KeepAny) else (policy,)


@dataclass(frozen=True, slots=True)
class KeepAny(KeepPolicy):
    """Policy that keeps a checkpoint if any of several policies keeps it.

    Example:
        ```python
        from dcp_io import CheckpointRecord, KeepEvery, KeepLast

        policy = KeepLast(1) | KeepEvery(10)  # makes a `KeepAny`
        records = [CheckpointRecord(step, created_seconds=step) for step in (5, 10, 15, 20, 25)]
        assert policy.keep(records, 30.0) == {10, 20, 25}
        ```
    """

    policies: tuple[KeepPolicy, ...]

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the steps that any of the policies keeps."""
        return set().union(*(policy.keep(records, now_seconds) for policy in self.policies))


@dataclass(frozen=True, slots=True)
class KeepAll(KeepPolicy):
    """Policy that keeps every checkpoint.

    Example:
        ```python
        from dcp_io import CheckpointRecord, KeepAll

        records = [CheckpointRecord(step, created_seconds=step) for step in (1, 2, 3)]
        assert KeepAll().keep(records, 30.0) == {1, 2, 3}
        ```
    """

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the steps of all checkpoints."""
        del now_seconds
        return {record.step for record in records}


def keeps_all(policy: KeepPolicy) -> bool:
    """Whether a policy always keeps every checkpoint, which makes listing them unnecessary."""
    return any(isinstance(part, KeepAll) for part in _parts(policy))


@dataclass(frozen=True, slots=True)
class KeepLast(KeepPolicy):
    """Policy that keeps the `count` newest checkpoints by creation time, whatever their steps.

    Example:
        ```python
        from dcp_io import CheckpointRecord, KeepLast

        records = [CheckpointRecord(step, created_seconds=step) for step in (1, 2, 3)]
        assert KeepLast(2).keep(records, 30.0) == {2, 3}
        ```
    """

    count: int

    def __post_init__(self) -> None:
        _check(_is_count(self.count), f"KeepLast({self.count!r}): keep a whole number of at least one")

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the steps of the checkpoints that were made last."""
        del now_seconds
        return {record.step for record in by_creation(records)[-self.count :]}


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """Policy that keeps the `count` best checkpoints by a metric; of equally good checkpoints, the newer.

    A checkpoint without the metric, or with NaN as its metric, is not kept.

    Args:
        count: Number of checkpoints to keep.
        metric: Name of the metric in the `metrics` of a save.
        mode: `min` if a lower metric is better, `max` if a higher metric is better.

    Example:
        ```python
        from dcp_io import CheckpointRecord, KeepBest

        losses = {0: 0.5, 1: 0.2, 2: 0.9}
        records = [CheckpointRecord(step, step, {"loss": loss}) for step, loss in losses.items()]
        assert KeepBest(1, "loss", mode="min").keep(records, 30.0) == {1}
        ```
    """

    count: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _check(_is_count(self.count), f"KeepBest({self.count!r}): keep a whole number of at least one")
        _check(isinstance(self.metric, str), f"KeepBest: metric is {self.metric!r}; give the name of a metric")
        _check(self.mode in ("min", "max"), f"KeepBest: mode is {self.mode!r}; choose 'min' or 'max'")

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the steps of the checkpoints with the best metric."""
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
    """Policy that keeps each checkpoint whose step is a multiple of `steps`.

    Example:
        ```python
        from dcp_io import CheckpointRecord, KeepEvery

        records = [CheckpointRecord(step, created_seconds=step) for step in (5, 10, 15)]
        assert KeepEvery(10).keep(records, 30.0) == {10}
        ```
    """

    steps: int

    def __post_init__(self) -> None:
        _check(_is_count(self.steps), f"KeepEvery({self.steps!r}): a number of steps is a whole number of at least 1")

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the steps of the checkpoints whose step is a multiple of `steps`."""
        del now_seconds
        return {record.step for record in records if record.step % self.steps == 0}


@dataclass(frozen=True, slots=True)
class KeepFor(KeepPolicy):
    """Policy that keeps each checkpoint for `seconds` seconds after its creation.

    Example:
        ```python
        from dcp_io import CheckpointRecord, KeepFor, KeepLast

        records = [CheckpointRecord(step, created_seconds=step) for step in (1, 2, 3)]
        assert (KeepLast(1) | KeepFor(28.5)).keep(records, 30.0) == {2, 3}
        ```
    """

    seconds: float

    def __post_init__(self) -> None:
        _check(isinstance(self.seconds, Real) and self.seconds > 0, f"KeepFor({self.seconds!r}): a time is more than 0")

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the steps of the checkpoints that are younger than `seconds` seconds."""
        return {record.step for record in records if now_seconds - record.created_seconds < self.seconds}


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _check(right: bool, message: str) -> None:
    if not right:
        raise ValueError(message)
