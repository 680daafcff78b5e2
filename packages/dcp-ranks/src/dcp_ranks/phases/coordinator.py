"""`Coordinator`, the contract of coordinators, and `LocalCoordinator` for a single process."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from dcp_ranks.errors import OperationError, format_ranks

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""Seconds that a rank waits for the others in one phase."""

T = TypeVar("T")
R = TypeVar("R")


class Coordinator(ABC):
    """Coordinator of the ranks in one operation, such as a save: each method is a phase. A context manager.

    Every rank calls the same methods in the same order. If a `map_fn` raises on any rank, or `reduce_fn` on the
    coordinator, all ranks raise `CheckpointException` with every failing rank's traceback. An exception that does not
    derive from `Exception`, such as `KeyboardInterrupt`, is re-raised unchanged on its own rank. Waiting is limited: a
    rank raises `PeerLostError` or `CoordinatorTimeoutError`, which name ranks, or `CoordinatorLostError`.

    Results of `map_fn` and `reduce_fn` are pickled for other ranks, and passed directly on the coordinator, the rank
    `coordinator_rank` within the group.
    """

    def __init__(self, rank: int, world_size: int, coordinator_rank: int) -> None:
        if not 0 <= coordinator_rank < world_size:
            raise ValueError(f"coordinator_rank is {coordinator_rank}; the group has the ranks 0 to {world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self.coordinator_rank = coordinator_rank
        self.is_coordinator = rank == coordinator_rank
        self.sequence = 0
        self.store: Any = None
        """Connection to the group's store, for finding the ranks' network, or None."""
        self.slowest: tuple[int, float] | None = None
        """Slowest rank in the last successful phase's `map_fn`, and its seconds; None if unknown."""

    def lost_ranks(self) -> Mapping[int, str]:
        """Return lost rank → how it was lost, as far as this rank knows; does not wait."""
        return {}

    @abstractmethod
    def reduce_scatter(self, phase: str, map_fn: Callable[[], T], reduce_fn: Callable[[list[T]], Sequence[R]]) -> R:
        """Run `map_fn` on every rank and `reduce_fn` on the coordinator; return to each rank its own element.

        Args:
            phase: Name for error messages.
            map_fn: Returns this rank's input for `reduce_fn`.
            reduce_fn: Takes the results of `map_fn`, and returns one element per rank, both in rank order.

        Ranks: every rank; collective.
        """

    @abstractmethod
    def all_reduce(self, phase: str, map_fn: Callable[[], T], reduce_fn: Callable[[list[T]], R]) -> R:
        """Run `map_fn` on every rank and `reduce_fn`, as for `reduce_scatter`; return its whole result to all ranks.

        Ranks: every rank; collective.
        """

    @abstractmethod
    def all_gather(self, phase: str, map_fn: Callable[[], T]) -> list[T]:
        """Run `map_fn` on every rank; return all results, in rank order, to all ranks.

        Ranks: every rank; collective.
        """

    @abstractmethod
    def broadcast(self, phase: str, fn: Callable[[], T]) -> T:
        """Run `fn` on the coordinator; return its result to all ranks.

        Ranks: every rank; collective.
        """

    @abstractmethod
    def barrier(self, phase: str) -> None:
        """Wait until every rank has called this method.

        Ranks: every rank; collective.
        """

    @abstractmethod
    def save_nonce(self) -> str:
        """Return a random string, equal on all ranks and different in other operations."""

    def tickets(self, queues: int) -> Callable[[int], int] | None:  # noqa: ARG002
        """Return a function that takes the next ticket of a queue: 0, 1, 2, …, each number once over all ranks.

        Tickets share out work during a phase. Several threads may call the function, but not between two phases.

        Args:
            queues: Number of queues, the same on all ranks. Each call creates new queues.

        Returns:
            The function (number of a queue, from 0 → ticket), which raises `CoordinatorLostError` if the store does not
            answer; None on all ranks if they lack a common store.

        Ranks: every rank, the same calls in the same order; does not wait for other ranks.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """End the operation on this rank, and delete its keys from the store. Later calls do nothing."""

    def agree(self, phase: str, make: Callable[[], object], describe: str) -> None:
        """Check that all ranks have an equal value; raise on every rank if not.

        Args:
            phase: Name for error messages.
            make: Returns this rank's value, which supports pickling and `==`.
            describe: Plural name of the values, such as `checkpoint ids`.

        Raises:
            OperationError: The values differ; the message lists each value with its ranks.

        Ranks: every rank; collective, as a separate phase.
        """

        def compare(values: list[object]) -> str | None:
            equal = [value for value in values if value == values[0]]
            return None if len(equal) == len(values) else list_by_ranks(map(repr, values))

        differences = self.all_reduce(phase, make, compare)
        if differences is not None:
            raise OperationError(f"phase {phase!r}: the ranks have different {describe}: {differences}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class LocalCoordinator(Coordinator):
    """Coordinator of a single process: each method calls its functions directly and raises errors unchanged."""

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1, coordinator_rank=0)
        self._nonce = secrets.token_hex(8)

    def agree(self, phase: str, make: Callable[[], object], describe: str) -> None:  # noqa: ARG002
        """Call `make`."""
        make()

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
        """Do nothing."""

    def save_nonce(self) -> str:
        """Return the same random string in each call."""
        return self._nonce

    def close(self) -> None:
        """End the operation."""


def list_by_ranks(texts: Iterable[str]) -> str:
    """Return each different text after its ranks; `texts` are in rank order."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(texts):
        by_text[text].append(rank)
    return "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in by_text.items())
