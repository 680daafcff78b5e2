"""`Coordinator`, the contract of coordinators of ranks, and `LocalCoordinator` for a single process.

A coordinator serves one operation, such as a save. `make_coordinator` chooses how the ranks communicate.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from dcp_ranks.errors import ERROR_TYPES, ErrorTypes
from dcp_ranks.phases.outcomes import format_ranks

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "Coordinator", "LocalCoordinator"]

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""Default time in seconds that a rank waits for the other ranks in one phase."""

T = TypeVar("T")
R = TypeVar("R")


class Coordinator(ABC):
    """Coordinator of the ranks in one operation, such as a save: each method is a phase. A context manager.

    Every rank calls the same methods in the same order. A phase ends the same way on all ranks: when a `map_fn` raises
    on any rank, or `reduce_fn` raises on the coordinator, all ranks raise `PhaseFailedError` with the tracebacks of all
    failing ranks. `KeyboardInterrupt`, `SystemExit` and others that are no `Exception` are re-raised unchanged on
    the rank where they occurred, and the other ranks raise `PhaseFailedError`. A rank never waits without limit: it
    raises `PeerLostError` or `CoordinatorTimeoutError`, which name ranks, or `CoordinatorLostError`.

    The argument `phase` of each method is the name of the phase, for error messages. The results of `map_fn` and
    `reduce_fn` are pickled for other ranks; results that stay on the coordinator are passed directly.

    Args:
        rank: Rank of this process within the group.
        world_size: Number of ranks in the group.
        coordinator_rank: Rank within the group that runs each `reduce_fn`.
        errors: Exception classes that the coordinator raises.
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
        """Rank whose `map_fn` took longest in the last successful phase, and its seconds; None if unknown."""

    @property
    def store(self) -> Any:
        """Connection to the store of the process group, for finding the network of the ranks; None if there is none."""
        return None

    def lost_ranks(self) -> Mapping[int, str]:
        """Return the ranks of which this one knows that they are lost, and how; looks, and does not wait."""
        return {}

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the coordinator, which runs each `reduce_fn`."""
        return self.rank == self.coordinator_rank

    @abstractmethod
    def reduce_scatter(self, phase: str, map_fn: Callable[[], T], reduce_fn: Callable[[list[T]], Sequence[R]]) -> R:
        """Run `map_fn` on every rank and `reduce_fn` on the coordinator; return to each rank its own element.

        Args:
            phase: Name of the phase, for error messages.
            map_fn: Function that returns this rank's input for `reduce_fn`.
            reduce_fn: Function that the coordinator calls with the results of all ranks' `map_fn`, in rank order;
                returns one element for each rank, in rank order.

        Ranks: every rank; collective.
        """

    @abstractmethod
    def all_reduce(self, phase: str, map_fn: Callable[[], T], reduce_fn: Callable[[list[T]], R]) -> R:
        """Run `map_fn` on every rank and `reduce_fn` on the coordinator; return the result to all ranks.

        Args:
            phase: Name of the phase, for error messages.
            map_fn: Function that returns this rank's input for `reduce_fn`.
            reduce_fn: Function that the coordinator calls with the results of all ranks' `map_fn`, in rank order.

        Ranks: every rank; collective.
        """

    @abstractmethod
    def all_gather(self, phase: str, map_fn: Callable[[], T]) -> list[T]:
        """Run `map_fn` on every rank, and return the results of all ranks, in rank order, to all ranks.

        Ranks: every rank; collective.
        """

    @abstractmethod
    def broadcast(self, phase: str, fn: Callable[[], T]) -> T:
        """Run `fn` on the coordinator alone, and return its result to all ranks.

        Ranks: every rank; collective.
        """

    @abstractmethod
    def barrier(self, phase: str) -> None:
        """Wait until every rank has called this method.

        Ranks: every rank; collective.
        """

    @abstractmethod
    def save_nonce(self) -> str:
        """Return a random string that is equal on all ranks of this operation and differs from other operations'."""

    def tickets(self, queues: int) -> Callable[[int], int] | None:  # noqa: ARG002
        """Return a function that takes the next ticket of a queue: 0, 1, 2, …, each number once over all ranks.

        By tickets ranks share out work while a phase runs, without waiting for each other. The function may be called
        from several threads, but not while this rank is between two phases.

        Args:
            queues: Number of queues, which have the numbers from 0 on; the same on all ranks. Each call makes new ones,
                whose tickets begin at 0.

        Returns:
            The function (number of a queue → ticket); None on all ranks if the ranks have no store in common.

        Raises:
            CoordinatorLostError: The store does not answer any more; raised by the function.

        Ranks: every rank, the same calls in the same order; a call does not wait for other ranks.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """End the operation on this rank, and delete its keys from the store. Later calls do nothing."""

    def agree(self, phase: str, value: object, describe: str) -> None:
        """Check that all ranks pass an equal `value`; raise on every rank if not.

        Args:
            phase: Name of the phase, for error messages.
            value: This rank's value; supports pickling and `==`.
            describe: Name of the values in the plural for the error message, such as `checkpoint ids`.

        Raises:
            RankDisagreementError: The values differ; the message lists each value with its ranks.

        Ranks: every rank; collective, as a phase of its own.
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
    """Coordinator of a single process: each method calls its functions directly, and errors are raised unchanged.

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
        """Return each rank's own element of the result of `reduce_fn`; see `Coordinator.reduce_scatter`."""
        (answer,) = reduce_fn([map_fn()])
        return answer

    def all_reduce(self, phase: str, map_fn: Callable[[], T], reduce_fn: Callable[[list[T]], R]) -> R:  # noqa: ARG002
        """Return the result of `reduce_fn` to every rank; see `Coordinator.all_reduce`."""
        return reduce_fn([map_fn()])

    def all_gather(self, phase: str, map_fn: Callable[[], T]) -> list[T]:  # noqa: ARG002
        """Return the results of all ranks to every rank; see `Coordinator.all_gather`."""
        return [map_fn()]

    def broadcast(self, phase: str, fn: Callable[[], T]) -> T:  # noqa: ARG002
        """Return the coordinator's result of `fn` to every rank; see `Coordinator.broadcast`."""
        return fn()

    def barrier(self, phase: str) -> None:
        """Do nothing, because there is no other rank to wait for; see `Coordinator.barrier`."""

    def save_nonce(self) -> str:
        """Return a random string, the same in each call; see `Coordinator.save_nonce`."""
        return self._nonce

    def close(self) -> None:
        """End the operation on this rank; see `Coordinator.close`."""


def _disagreement(values: list[object], describe: str) -> str | None:
    """Return a text of the values and their ranks, or None if all values are equal."""
    if all(value == values[0] for value in values):
        return None
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        by_text[repr(value)].append(rank)
    said = "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in by_text.items())
    return f"the ranks have different {describe}: {said}"
