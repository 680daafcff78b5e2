"""`PhasedCoordinator`, independent of transport: from each rank's `Outcome`, the coordinator makes a `Verdict`."""

from __future__ import annotations

import pickle
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

from dcp_ranks.errors import (
    CheckpointException,
    CoordinatorTimeoutError,
    OperationError,
    PeerLostError,
    RanksError,
    format_ranks,
)
from dcp_ranks.phases.coordinator import Coordinator, list_by_ranks
from dcp_ranks.transport.store_wire import decode, encode

_MAX_TEXT = 64 << 10
_MAX_EXCEPTION_BYTES = 64 << 10
_MAX_FULL_TRACEBACKS = 32

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on one rank: traceback as text, and the pickled exception or None."""

    rank: int
    text: str
    exception: bytes | None

    def revive(self) -> BaseException | None:
        """Unpickle the exception; None if that fails here."""
        if self.exception is None:
            return None
        try:
            error = pickle.loads(self.exception)
        except Exception:  # noqa: BLE001 - a class of the failing rank's own code may do anything
            return None
        return error if isinstance(error, BaseException) else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rank's pickled result or failure, label, seconds."""

    label: str
    value: bytes | None = None
    failure: Failure | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a phase, the same on every rank.

    `missing` ranks did not arrive within `waited_seconds`; `unheard` ranks were busy when a failure was reported.
    `common` is the pickled value for all ranks; if `scattered`, each rank's value is sent separately. `hosts`:
    missing or lost rank → its host.
    """

    failures: tuple[Failure, ...] = ()
    missing: tuple[int, ...] = ()
    lost: tuple[tuple[int, str], ...] = ()
    unheard: tuple[int, ...] = ()
    waited_seconds: float = 0.0
    disagreement: str | None = None
    common: bytes | None = None
    scattered: bool = False
    slowest: tuple[int, float] | None = None
    hosts: tuple[tuple[int, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the phase succeeded."""
        return not self.failures and not self.missing and not self.lost and self.disagreement is None


@dataclass(slots=True)
class Answer:
    """The verdict, pickled values per rank if it is `scattered`, and the coordinator's `own` value, not pickled."""

    verdict: Verdict
    each: Sequence[bytes] = ()
    own: Any = None
    error: BaseException | None = None


class PhasedCoordinator(Coordinator):
    """Base of coordinators that collect all outcomes and return one verdict."""

    _sends_own_value = False
    """Whether the coordinator pickles its own `map_fn` result, too, for fake groups."""

    _steps = 0
    _passed = 0
    _ended = False

    @abstractmethod
    def _exchange(
        self, number: int, phase: str, outcome: Outcome, conclude: Callable[[list[Outcome]], Answer]
    ) -> tuple[Verdict, bytes | None]:
        """Exchange outcomes; return the verdict, and this rank's answer if it is scattered.

        `conclude` runs once, on the coordinator, with the outcomes in rank order, and never raises.
        """

    @abstractmethod
    def _withdraw(self, number: int, failure: Failure) -> None:
        """Make phase `number` fail on other ranks, or the next one if it has succeeded. Raise no `Exception`."""

    def _check_waited_for(self, number: int, phase: str) -> None:
        """Raise if the other ranks have ended the phase."""

    def reduce_scatter(self, phase: str, map_fn: Callable[[], T], reduce_fn: Callable[[list[T]], Sequence[R]]) -> R:
        """See `Coordinator.reduce_scatter`."""

        def answer(values: list[T]) -> Answer:
            answers = reduce_fn(values)
            if len(answers) != self.world_size:
                raise OperationError(f"phase {phase!r}: {len(answers)} results for {self.world_size} ranks")
            each = [b"" if rank == self.rank else encode(one) for rank, one in enumerate(answers)]
            return Answer(Verdict(scattered=True), each, own=answers[self.rank])

        return cast("R", self._run("reduce_scatter", phase, map_fn, answer))

    def all_reduce(self, phase: str, map_fn: Callable[[], T], reduce_fn: Callable[[list[T]], R]) -> R:
        """See `Coordinator.all_reduce`."""

        def answer(values: list[T]) -> Answer:
            result = reduce_fn(values)
            return Answer(Verdict(common=encode(result)), own=result)

        return cast("R", self._run("all_reduce", phase, map_fn, answer))

    def all_gather(self, phase: str, map_fn: Callable[[], T]) -> list[T]:
        """See `Coordinator.all_gather`."""

        def answer(values: list[T]) -> Answer:
            return Answer(Verdict(common=encode(values)), own=values)

        return cast("list[T]", self._run("all_gather", phase, map_fn, answer))

    def broadcast(self, phase: str, fn: Callable[[], T]) -> T:
        """See `Coordinator.broadcast`."""

        def answer(values: list[T | None]) -> Answer:
            value = values[self.rank]
            return Answer(Verdict(common=encode(value)), own=value)

        return cast("T", self._run("broadcast", phase, fn if self.is_coordinator else lambda: None, answer))

    def barrier(self, phase: str) -> None:
        """See `Coordinator.barrier`."""
        self._run("barrier", phase, lambda: None, lambda _: Answer(Verdict()))

    def _run(self, kind: str, phase: str, map_fn: Callable[[], Any], answer: Callable[[list[Any]], Answer]) -> Any:
        if self._ended:
            raise OperationError(f"phase {phase!r}: this operation has ended; make a new coordinator for each one")
        number = self._steps  # `map_fn` may run phases of its own
        self._steps += 1
        value, outcome, error = self._attempt(f"{kind} {phase!r}", map_fn)
        decided: list[Answer] = []

        def conclude(outcomes: list[Outcome]) -> Answer:
            decided.append(self._conclude(number, phase, outcomes, value, answer))
            return decided[0]

        try:
            verdict, own = self._exchange(number, phase, outcome, conclude)
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
                _fail(local, self._error(phase, verdict, local))
        finally:
            # An error's traceback holds this frame, so its values would live until a garbage collection.
            error = local = None
        self._passed = self._steps
        self.slowest = verdict.slowest
        if decided:
            return decided[0].own
        data = own if verdict.scattered else verdict.common
        return None if data is None else decode(data)

    def _attempt(self, label: str, map_fn: Callable[[], T]) -> tuple[T | None, Outcome, BaseException | None]:
        start = time.monotonic()
        try:
            value = map_fn()
            seconds = time.monotonic() - start
            stays_here = self.is_coordinator and not self._sends_own_value
            data = None if stays_here or value is None else encode(value)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            return None, Outcome(label, failure=failure_of(self.rank, error)), error
        return value, Outcome(label, value=data, seconds=seconds), None

    def _conclude(
        self, number: int, phase: str, outcomes: list[Outcome], own: Any, answer: Callable[[list[Any]], Answer]
    ) -> Answer:
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        if failures:
            return Answer(Verdict(failures=shorten(failures)))
        labels = [outcome.label for outcome in outcomes]
        if labels.count(labels[0]) < len(labels):
            steps = f"the ranks are in different steps ({number} of their operations): {list_by_ranks(labels)}"
            return Answer(Verdict(disagreement=steps))
        token = _check.set(partial(self._check_waited_for, number, phase))
        try:
            values: list[Any] = []
            for rank, outcome in enumerate(outcomes):
                values.append(own if rank == self.rank else outcome.value and decode(outcome.value))
                outcomes[rank] = replace(outcome, value=None)  # messages of many ranks take much memory
            found = answer(values)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            verdict = Verdict(failures=(failure_of(self.rank, error),))
            return Answer(verdict, error=error)
        finally:
            _check.reset(token)
        seconds = [outcome.seconds for outcome in outcomes]
        slowest = max(seconds)
        return replace(found, verdict=replace(found.verdict, slowest=(seconds.index(slowest), slowest)))

    def _error(self, phase: str, verdict: Verdict, local: BaseException | None) -> RanksError:
        if verdict.failures:
            busy = f"; {format_ranks(verdict.unheard)} had not finished" if verdict.unheard else ""
            busy += "".join(f"; rank {rank} is gone ({how})" for rank, how in verdict.lost)
            failures = {failure.rank: (failure.revive(), failure.text) for failure in verdict.failures}
            if local is not None and self.rank in failures:
                failures[self.rank] = (local, failures[self.rank][1])
            return CheckpointException(f"phase {phase!r} did not succeed{busy}", failures)
        if verdict.lost:
            ranks, how = zip(*verdict.lost, strict=True)
            return PeerLostError(phase, ranks, how, dict(verdict.hosts))
        if verdict.missing:
            return CoordinatorTimeoutError(phase, verdict.missing, verdict.waited_seconds, dict(verdict.hosts))
        return OperationError(f"phase {phase!r}: {verdict.disagreement}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._abandon(error)
        self.close()

    def _abandon(self, error: BaseException) -> None:
        if not self._ended:
            self._ended = True
            self._withdraw(self._passed, failure_of(self.rank, error))


def _fail(local: BaseException | None, shared: RanksError) -> NoReturn:
    """Raise the shared error, unless this rank was interrupted itself."""
    try:
        if local is not None and not isinstance(local, Exception):
            raise local
        raise shared from local
    finally:
        del local, shared  # this frame would keep their tracebacks alive until a garbage collection


_check: ContextVar[Callable[[], None] | None] = ContextVar("_check", default=None)


def check_fence() -> None:
    """Raise if the other ranks have ended the current phase without the coordinator; do nothing outside phases.

    Call it in a `reduce_fn` right before an irreversible step, as `finish` of a storage writer does before publishing.

    Raises:
        OperationError: The other ranks have ended the phase, or can no longer be reached.

    Ranks: the coordinator.
    """
    check = _check.get()
    if check is not None:
        check()


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return a `Failure`, which can be sent even if the exception cannot be pickled."""
    # The outermost frame is the coordinator's own call of the user's function.
    inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
    try:
        text = "".join(traceback.format_exception(type(error), error, inner or error.__traceback__))
    except Exception:  # noqa: BLE001 - an exception's own methods may fail while it is described
        text = f"{type(error).__qualname__} (it cannot be described)\n"
    return Failure(rank, _clip(text), _portable(error))


def shorten(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Sort failures by rank; shorten all but the first few tracebacks."""
    ordered = sorted(failures, key=lambda failure: failure.rank)
    whole, rest = ordered[:_MAX_FULL_TRACEBACKS], ordered[_MAX_FULL_TRACEBACKS:]
    return (*whole, *(Failure(each.rank, each.text.rstrip().rpartition("\n")[2], None) for each in rest))


def _portable(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
    except Exception:  # noqa: BLE001 - pickling runs the exception's own code
        return None
    return data if len(data) <= _MAX_EXCEPTION_BYTES else None


def _clip(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
