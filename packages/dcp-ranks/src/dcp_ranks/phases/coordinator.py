"""The contract of a coordinator, and the coordinator of one process.

A coordinator is for one operation, such as a save. `make_coordinator` decides how its ranks reach each other.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from dcp_ranks.errors import ERROR_TYPES, ErrorTypes
from dcp_ranks.phases.outcomes import format_ranks

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "Coordinator", "LocalCoordinator"]

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""Time in seconds that a rank waits for the others in one phase."""

T = TypeVar("T")
R = TypeVar("R")


class Coordinator(ABC):
    """Coordinator of one operation, such as a save: leads all ranks through the same phases. A context manager.

    Every rank calls the same methods in the same order. A phase ends the same way on all ranks: when a `map_fn` raises
    on any rank, or the coordinator's `reduce_fn` does, all ranks raise `PhaseFailedError` with every failing rank's
    traceback. `KeyboardInterrupt`, `SystemExit` and others that are no `Exception` pass through unchanged on the
    rank that raised them, after a report to the other ranks, which raise `PhaseFailedError`. Waiting ends with
    `PeerLostError` or `CoordinatorTimeoutError`, which name ranks, or with `CoordinatorLostError`.

    Values are pickled to be sent to other ranks of the job; the coordinator gets its own value directly, not pickled.

    Args:
        rank: Number of this rank within the group.
        world_size: Number of ranks.
        coordinator_rank: Number of the rank that runs each `reduce_fn`.
        errors: Classes of the errors that the coordinator raises.
    """

    def __init__(self, rank: int, world_size: int, coordinator_rank: int, *, errors: ErrorTypes = ERROR_TYPES) -> None:
        if not 0 <= coordinator_rank < world_size:
            raise ValueError(f"coordinator_rank is {coordinator_rank}; the group has the ranks 0 to {world_size - 1}")
        self.errors = errors
        self.rank = rank
        self.world_size = world_size
        self.coordinator_rank = coordinator_rank
        self.sequence = 0
        self.slowest: tuple[int, float] | None = None
        """Slowest rank of the last successful phase: its `map_fn` took longest, with its seconds; None if unknown."""

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank runs each `reduce_fn`."""
        return self.rank == self.coordinator_rank

    @abstractmethod
    def reduce_scatter(self, phase: str, map_fn: Callable[[], T], reduce_fn: Callable[[list[T]], Sequence[R]]) -> R:
        """Give each rank its own element of `reduce_fn` applied to every rank's `map_fn` value, in rank order."""

    @abstractmethod
    def all_reduce(self, phase: str, map_fn: Callable[[], T], reduce_fn: Callable[[list[T]], R]) -> R:
        """Give all ranks the one result of `reduce_fn` applied to every rank's `map_fn` value, in rank order."""

    @abstractmethod
    def all_gather(self, phase: str, map_fn: Callable[[], T]) -> list[T]:
        """Give all ranks every rank's `map_fn` value, in rank order."""

    @abstractmethod
    def broadcast(self, phase: str, fn: Callable[[], T]) -> T:
        """Give all ranks the value of `fn`, which runs on the coordinator alone."""

    @abstractmethod
    def barrier(self, phase: str) -> None:
        """Wait until every rank has called this."""

    @abstractmethod
    def save_nonce(self) -> str:
        """Return a fresh random string, equal on all ranks of this operation."""

    @abstractmethod
    def close(self) -> None:
        """End the operation on this rank and remove its keys from the store. May be called again."""

    def agree(self, phase: str, value: object, describe: str) -> None:
        """Return only if `value` is equal on all ranks.

        Args:
            phase: Name of the phase.
            value: Value to compare; it can be pickled and compared with `==`.
            describe: Description of the values, in the plural, for the error message.

        Raises:
            RankDisagreementError: The values differ; raised on every rank, naming each value and its ranks.

        Ranks: every rank; the call is a separate phase.
        """
        disagreement = self.all_reduce(phase, lambda: value, lambda values: _disagreement(values, describe))
        if disagreement is not None:
            raise self.errors.rank_disagreement(f"phase {phase!r}: {disagreement}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class LocalCoordinator(Coordinator):
    """Coordinator of one process: every phase is a plain call, and errors are raised unchanged.

    Example:
        ```python
        from dcp_ranks import LocalCoordinator

        with LocalCoordinator() as ranks:
            assert ranks.broadcast("count words", lambda: 4) == 4
        ```
    """

    def __init__(self, *, errors: ErrorTypes = ERROR_TYPES) -> None:
        super().__init__(rank=0, world_size=1, coordinator_rank=0, errors=errors)
        self._nonce = secrets.token_hex(8)

    def reduce_scatter(self, phase: str, map_fn: Callable[[], T], reduce_fn: Callable[[list[T]], Sequence[R]]) -> R:  # noqa: ARG002
        """See `Coordinator.reduce_scatter`."""
        (answer,) = reduce_fn([map_fn()])
        return answer

    def all_reduce(self, phase: str, map_fn: Callable[[], T], reduce_fn: Callable[[list[T]], R]) -> R:  # noqa: ARG002
        """See `Coordinator.all_reduce`."""
        return reduce_fn([map_fn()])

    def all_gather(self, phase: str, map_fn: Callable[[], T]) -> list[T]:  # noqa: ARG002
        """See `Coordinator.all_gather`."""
        return [map_fn()]

    def broadcast(self, phase: str, fn: Callable[[], T]) -> T:  # noqa: ARG002
        """See `Coordinator.broadcast`."""
        return fn()

    def barrier(self, phase: str) -> None:
        """See `Coordinator.barrier`."""

    def save_nonce(self) -> str:
        """See `Coordinator.save_nonce`."""
        return self._nonce

    def close(self) -> None:
        """See `Coordinator.close`."""


def _disagreement(values: list[object], describe: str) -> str | None:
    """Return a text of the values and their ranks, or None if all values are equal."""
    if all(value == values[0] for value in values):
        return None
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        by_text[repr(value)].append(rank)
    said = "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in by_text.items())
    return f"the ranks have different {describe}: {said}"
