"""Policies for saving: they decide when a save is due, and can be combined with `|`. The manager saves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["EverySeconds", "EverySteps", "Moment", "OnRequest", "SaveAny", "SavePolicy"]


@dataclass(frozen=True, slots=True)
class Moment:
    """State of the training after one step, as one rank sees it."""

    step: int
    seconds_since_save: float
    """Seconds since the last save, or since the manager was made."""
    signals: frozenset[int] = frozenset()
    """Signals that this process has received and the manager has not handled yet."""
    requested: bool = False
    """Whether this process has called `request_save` since the last save."""


class SavePolicy(ABC):
    """Base class of policies that decide whether a save is due."""

    same_everywhere = False
    """Whether the decision depends only on the step, so ranks need not communicate."""
    signals: frozenset[int] = frozenset()
    """Signals for which the manager must install handlers."""
    stop_signals: frozenset[int] = frozenset()
    """The signals in `signals` that end the training."""

    @abstractmethod
    def due(self, moment: Moment) -> bool:
        """Whether a save is due, from what this rank knows; a signal or request on any rank applies to all ranks."""

    def __or__(self, other: SavePolicy) -> SaveAny:
        return SaveAny((*_parts(self), *_parts(other)))


def _parts(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    return policy.policies if isinstance(policy, SaveAny) else (policy,)


@dataclass(frozen=True)
class SaveAny(SavePolicy):
    """Policy that saves when any of several policies decides to save.

    Example:
        ```python
        from dcp_manager import CheckpointManager, EverySteps, OnSignal

        policy = EverySteps(1000) | OnSignal()  # makes a `SaveAny`
        with CheckpointManager("run", save_policy=policy) as manager:
            manager.maybe_save(1000, {"step": 1000})
        ```
    """

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "same_everywhere", all(policy.same_everywhere for policy in self.policies))
        for name in ("signals", "stop_signals"):
            object.__setattr__(self, name, frozenset().union(*(getattr(policy, name) for policy in self.policies)))

    def due(self, moment: Moment) -> bool:
        """Whether any of the policies decides to save."""
        return any(policy.due(moment) for policy in self.policies)


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Policy that saves at each step that is a multiple of `steps`, from step `first` on.

    Example:
        ```python
        from dcp_manager import CheckpointManager, EverySteps

        with CheckpointManager("run", save_policy=EverySteps(2)) as manager:
            for step in range(1, 6):
                manager.maybe_save(step, {"step": step})
            assert [record.step for record in manager.checkpoints()] == [2, 4]
        ```
    """

    steps: int
    first: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"EverySteps({self.steps}): a number of steps is at least 1")
        object.__setattr__(self, "same_everywhere", True)

    def due(self, moment: Moment) -> bool:
        """Whether the step is a multiple of `steps`, and at least `first`."""
        return moment.step >= self.first and moment.step % self.steps == 0


@dataclass(frozen=True)
class EverySeconds(SavePolicy):
    """Policy that saves when `seconds` seconds have passed since the last save, on the coordinator's clock.

    Example:
        ```python
        from dcp_manager import CheckpointManager, EverySeconds

        with CheckpointManager("run", save_policy=EverySeconds(600)) as manager:
            saved = manager.maybe_save(1, {"step": 1})
            assert not saved  # ten minutes have not passed
        ```
    """

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"EverySeconds({self.seconds}): a time is more than 0")

    def due(self, moment: Moment) -> bool:
        """Whether `seconds` seconds have passed since the last save."""
        return moment.seconds_since_save >= self.seconds


@dataclass(frozen=True)
class OnRequest(SavePolicy):
    """Policy that saves when any rank has called `manager.request_save()`.

    Example:
        ```python
        from dcp_manager import CheckpointManager, OnRequest

        with CheckpointManager("run", save_policy=OnRequest()) as manager:
            manager.request_save()
            assert manager.maybe_save(1, {"step": 1})
        ```
    """

    def due(self, moment: Moment) -> bool:
        """Whether this process has called `request_save` since the last save."""
        return moment.requested
