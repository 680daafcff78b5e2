"""`PhasedCoordinator`: base class with the rules of phases, independent of how messages between ranks are sent.

A subclass sends the outcome of each rank to the coordinator, and the verdict (the result of the phase) back to all
ranks. Not in this module: the subclasses, `StoreCoordinator` and `CollectiveCoordinator`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

from dcp_ranks.errors import ERROR_TYPES, ErrorTypes, RanksError
from dcp_ranks.phases.coordinator import Coordinator
from dcp_ranks.phases.fence import fenced
from dcp_ranks.phases.outcomes import Failure, Outcome, Step, Verdict, failure_of, format_ranks, shorten
from dcp_ranks.transport.pickled import decode, encode

__all__ = ["Answer", "PhasedCoordinator"]

T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class Answer:
    """The coordinator's decision about a phase: the verdict, and the return values for the ranks.

    `each` holds the pickled return value for each rank if the verdict is `scattered`; `own` is the coordinator's own
    return value, not pickled; `error` is the exception of its `reduce_fn`.
    """

    verdict: Verdict
    each: Sequence[bytes] = ()
    own: Any = None
    error: BaseException | None = None


class PhasedCoordinator(Coordinator):
    """Base of coordinators that send each rank's outcome to the coordinator, and one verdict back to every rank.

    Args:
        rank: Rank of this process within the group.
        world_size: Number of ranks in the group.
        coordinator_rank: Rank within the group that runs each `reduce_fn`.
        errors: Exception classes that the coordinator raises.
    """

    _sends_own_value = False
    """Whether the coordinator pickles the result of its own `map_fn` too, which only fake process groups need."""

    def __init__(self, rank: int, world_size: int, coordinator_rank: int, *, errors: ErrorTypes = ERROR_TYPES) -> None:
        super().__init__(rank, world_size, coordinator_rank, errors=errors)
        self._steps = 0
        self._passed = 0
        """The first phase whose success this rank does not know yet."""
        self._ended = False

    @abstractmethod
    def _exchange(
        self, step: Step, outcome: Outcome, conclude: Callable[[list[Outcome]], Answer]
    ) -> tuple[Verdict, bytes | None]:
        """Exchange one phase's outcomes and verdict.

        Args:
            step: Phase to exchange.
            outcome: Outcome of this rank.
            conclude: Function that decides the verdict; called once, on the coordinator, with every rank's outcome in
                rank order; never raises.

        Returns:
            The verdict, and this rank's own answer if the verdict is `scattered` and this rank is not the coordinator.
        """

    @abstractmethod
    def _withdraw(self, number: int, failure: Failure) -> None:
        """Make phase `number` fail on the other ranks; if it has already succeeded, make the next phase fail.

        This rank may be inside the phase, or may never enter it. Never raises an `Exception`.
        """

    def _check_waited_for(self, step: Step) -> None:
        """Raise if the other ranks have ended the phase that this rank, the coordinator, is about to decide."""

    def reduce_scatter(self, phase: str, map_fn: Callable[[], T], reduce_fn: Callable[[list[T]], Sequence[R]]) -> R:
        """Return each rank's own element of the result of `reduce_fn`; see `Coordinator.reduce_scatter`."""

        def answer(values: list[T]) -> Answer:
            answers = reduce_fn(values)
            if len(answers) != self.world_size:
                raise self.errors.operation(f"phase {phase!r}: {len(answers)} results for {self.world_size} ranks")
            each = [b"" if rank == self.rank else encode(one) for rank, one in enumerate(answers)]
            return Answer(Verdict(scattered=True), each, own=answers[self.rank])

        return cast("R", self._run("reduce_scatter", phase, map_fn, answer))

    def all_reduce(self, phase: str, map_fn: Callable[[], T], reduce_fn: Callable[[list[T]], R]) -> R:
        """Return the result of `reduce_fn` to every rank; see `Coordinator.all_reduce`."""

        def answer(values: list[T]) -> Answer:
            result = reduce_fn(values)
            return Answer(Verdict(common=encode(result)), own=result)

        return cast("R", self._run("all_reduce", phase, map_fn, answer))

    def all_gather(self, phase: str, map_fn: Callable[[], T]) -> list[T]:
        """Return the results of all ranks to every rank; see `Coordinator.all_gather`."""

        def answer(values: list[T]) -> Answer:
            return Answer(Verdict(common=encode(values)), own=values)

        return cast("list[T]", self._run("all_gather", phase, map_fn, answer))

    def broadcast(self, phase: str, fn: Callable[[], T]) -> T:
        """Return the coordinator's result of `fn` to every rank; see `Coordinator.broadcast`."""

        def answer(values: list[T | None]) -> Answer:
            value = values[self.rank]
            return Answer(Verdict(common=encode(value)), own=value)

        return cast("T", self._run("broadcast", phase, fn if self.is_coordinator else lambda: None, answer))

    def barrier(self, phase: str) -> None:
        """Wait until every rank has called this method; see `Coordinator.barrier`."""
        self._run("barrier", phase, lambda: None, lambda _: Answer(Verdict()))

    def _run(self, kind: str, phase: str, map_fn: Callable[[], Any], answer: Callable[[list[Any]], Answer]) -> Any:
        if self._ended:
            raise self.errors.operation(
                f"phase {phase!r}: this operation has ended; make a new coordinator for each one"
            )
        step = Step(self._steps, kind, phase)
        self._steps += 1
        value, outcome, error = self._attempt(step, map_fn)
        decided: list[Answer] = []

        def conclude(outcomes: list[Outcome]) -> Answer:
            decided.append(self._conclude(step, outcomes, value, answer))
            return decided[0]

        try:
            verdict, own = self._exchange(step, outcome, conclude)
        except RanksError as lost:
            self._ended = True
            decided.clear()
            if error is None:
                raise
            _fail(error, lost)
        except BaseException as interrupted:
            self._abandon(interrupted)
            raise
        else:
            if not verdict.ok:
                self._ended = True
                local = decided[0].error if decided and error is None else error
                decided.clear()
                _fail(local, self._error(step, verdict, local))
        finally:
            # The traceback of an error leads to this frame: what it holds would live until a garbage collection.
            error = local = None
        self._passed = self._steps
        self.slowest = verdict.slowest
        if decided:
            return decided[0].own
        data = own if verdict.scattered else verdict.common
        return None if data is None else decode(data)

    def _attempt(self, step: Step, map_fn: Callable[[], T]) -> tuple[T | None, Outcome, BaseException | None]:
        """Call `map_fn`; returns its value, the outcome for the coordinator, and its error."""
        start = time.monotonic()
        try:
            value = map_fn()
            seconds = time.monotonic() - start
            stays_here = self.is_coordinator and not self._sends_own_value
            data = None if stays_here or value is None else encode(value)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            return None, Outcome(step.label, failure=failure_of(self.rank, error)), error
        return value, Outcome(step.label, value=data, seconds=seconds), None

    def _conclude(self, step: Step, outcomes: list[Outcome], own: Any, answer: Callable[[list[Any]], Answer]) -> Answer:
        """Decide the verdict of a phase. Coordinator only; never raises."""
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        if failures:
            return Answer(Verdict(failures=shorten(failures)))
        disagreement = _different_steps(step, outcomes)
        if disagreement is not None:
            return Answer(Verdict(disagreement=disagreement))
        try:
            values = [
                own if rank == self.rank else None if outcome.value is None else decode(outcome.value)
                for rank, outcome in enumerate(outcomes)
            ]
            with fenced(lambda: None if self._ended else self._check_waited_for(step)):  # an interrupt may leave it
                found = answer(values)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            verdict = Verdict(failures=(failure_of(self.rank, error),))
            return Answer(verdict, error=error)
        slowest = max(range(len(outcomes)), key=lambda rank: outcomes[rank].seconds)
        return replace(found, verdict=replace(found.verdict, slowest=(slowest, outcomes[slowest].seconds)))

    def _error(self, step: Step, verdict: Verdict, local: BaseException | None) -> RanksError:
        """Return the error that every rank raises for a verdict that is not ok."""
        if verdict.failures:
            busy = f"; {format_ranks(verdict.unheard)} had not finished" if verdict.unheard else ""
            busy += "".join(f"; rank {rank} is gone ({how})" for rank, how in verdict.lost)
            failures = {failure.rank: (failure.revive(), failure.text) for failure in verdict.failures}
            if local is not None and self.rank in failures:
                failures[self.rank] = (local, failures[self.rank][1])
            return self.errors.phase_failed(f"phase {step.phase!r} did not succeed{busy}", failures)
        if verdict.lost:
            return self.errors.peer_lost(step.phase, *zip(*verdict.lost, strict=True))
        if verdict.missing:
            return self.errors.coordinator_timeout(step.phase, verdict.missing, verdict.waited_seconds)
        return self.errors.rank_disagreement(f"phase {step.phase!r}: {verdict.disagreement}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._abandon(error)
        self.close()

    def _abandon(self, error: BaseException) -> None:
        """End the operation for all ranks: an interrupt may come at any moment, between two phases or inside one."""
        if not self._ended:
            self._ended = True
            self._withdraw(self._passed, failure_of(self.rank, error))


def _fail(local: BaseException | None, shared: RanksError) -> NoReturn:
    """Raise the error that all ranks share, unless this rank was interrupted itself."""
    try:
        if local is not None and not isinstance(local, Exception):
            raise local
        raise shared from local
    finally:
        del local, shared  # in this frame they would keep all that their tracebacks hold until a garbage collection


def _different_steps(step: Step, outcomes: list[Outcome]) -> str | None:
    by_label: dict[str, list[int]] = defaultdict(list)
    for rank, outcome in enumerate(outcomes):
        by_label[outcome.label].append(rank)
    if len(by_label) == 1:
        return None
    steps = "; ".join(f"{format_ranks(ranks)}: {label}" for label, ranks in by_label.items())
    return f"the ranks are in different steps ({step.number} of their operations): {steps}"
