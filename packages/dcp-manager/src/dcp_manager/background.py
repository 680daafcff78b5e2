"""Outcomes of background saves, and the tolerance of failed ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from dcp_base.logs import library_logger
from dcp_core import (
    CheckpointException,
    CoordinatorLostError,
    CoordinatorTimeoutError,
    DcpError,
    Metadata,
    PeerLostError,
)
from dcp_core.errors import SaveSkippedError
from dcp_manager.together import Ranks


class Saver(Protocol):
    """A background saver, such as `dcp_async.AsyncSaver`."""

    def save(self, state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **place: Any) -> Any:
        """Begin to save a copy; `place` is one of `checkpoint_id` and `storage_writer`."""
        ...


def future_of(answer: Any) -> Future[Metadata]:
    """Return the future in the result of `Saver.save`."""
    future: Future[Metadata] = getattr(answer, "upload_completion", answer)
    return future


class UnfinishedSaveError(DcpError, TimeoutError):
    """A background save takes longer than the manager waits; it continues."""


_log = library_logger(__name__)


_Failures = dict[int, tuple[BaseException | None, str]]
# A rank's report of an ended save: its step, and the failures by rank; None if it was skipped.
_End = tuple[int, dict[int, str] | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a background save, the same on all ranks; `error` is None after a success."""

    step: int
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class _Save:
    number: int
    step: int
    future: Future[Any]
    settled: threading.Event

    def failures(self, rank: int) -> _Failures | None:
        error = None if self.future.cancelled() else self.future.exception()
        if self.future.cancelled() or isinstance(error, SaveSkippedError):
            return None
        return {} if error is None else _failures_of(error, rank)


class BackgroundSaves:
    """This rank's background saves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: list[_Save] = []
        self._begun = 0

    @property
    def steps(self) -> frozenset[int]:
        """Steps of saves that `outcomes` has not returned."""
        with self._lock:
            return frozenset(save.step for save in self._saves if not save.settled.is_set())

    def begin(self) -> int:
        """Return a save's number, equal on all ranks even if one fails before `add`."""
        self._begun += 1
        return self._begun

    def add(self, number: int, step: int, future: Future[Any], settle: Callable[[bool], None]) -> None:
        """Add a running save; `settle` is called with its success, in the thread that ends the future."""
        settled = threading.Event()
        with self._lock:
            self._saves.append(_Save(number, step, future, settled))

        def ended(done: Future[Any]) -> None:
            try:
                settle(not done.cancelled() and done.exception() is None)
            finally:
                settled.set()

        future.add_done_callback(ended)

    def overdue(self, timeout_seconds: float, setting: str, where: str) -> UnfinishedSaveError | None:
        """Wait until all saves are settled; return an error, with `setting` and `where`, after `timeout_seconds`."""
        end = time.monotonic() + min(timeout_seconds, threading.TIMEOUT_MAX)
        with self._lock:
            events = [save.settled for save in self._saves]
        for event in events:
            event.wait(max(0.0, end - time.monotonic()))
        steps = ", ".join(map(str, sorted(self.steps)))
        if not steps:
            return None
        return UnfinishedSaveError(
            f"{where}: the save of step {steps} was still running after {timeout_seconds:.1f} s ({setting}); its "
            "checkpoint does not exist yet, earlier ones stay. Allow more time, or look for what holds the storage up"
        )

    def outcomes(self, ranks: Ranks, late: BaseException | None = None) -> tuple[list[Outcome], BaseException | None]:
        """Return, once, the outcomes of saves that have ended on all ranks, and an error if a rank passed `late`.

        Both are the same on all ranks. Collective.
        """
        with self._lock:
            ended = [save for save in self._saves if save.settled.is_set()]
            running = frozenset(save.number for save in self._saves) - {save.number for save in ended}
        own = {save.number: save.failures(ranks.rank) for save in ended}
        ends = {save.number: (save.step, _texts(own[save.number])) for save in ended}
        lateness = {} if late is None else {ranks.rank: f"{type(late).__name__}: {late}"}
        decided, all_late = ranks.combine("ask for failed saves", lambda: (ends, running, lateness), _joined)
        with self._lock:
            self._saves = [save for save in self._saves if save.number not in decided]
        found = []
        errors = {save.number: save.future.exception() for save in ended if own[save.number]}
        for number, (step, texts) in sorted(decided.items()):
            if texts is None:
                _log.info("the save of step %d was left out, since another one was running", step)
                continue
            what = f"the save of step {step} in the background failed"
            error = _error(ranks, what, texts, own.get(number) or {}, errors.get(number))
            found.append(Outcome(step, error))
        causes = {} if late is None else {ranks.rank: (late, "")}
        return found, _error(ranks, "a save in the background has not ended", all_late, causes, late)


def _texts(failures: _Failures | None) -> dict[int, str] | None:
    return None if failures is None else {rank: text for rank, (_, text) in failures.items()}


def _error(
    ranks: Ranks, what: str, texts: dict[int, str], known: Mapping[int, tuple[Any, str]], own: BaseException | None
) -> BaseException | None:
    if not texts:
        return None
    if own is not None and ranks.alone:
        return own
    error = CheckpointException(what, {rank: (known.get(rank, (None, ""))[0], text) for rank, text in texts.items()})
    error.__cause__ = own
    return error


def _failures_of(error: BaseException, rank: int) -> _Failures:
    if isinstance(error, CheckpointException) and error.failures:
        return error.failures
    return {rank: (error, f"{type(error).__name__}: {error}")}


def _joined(
    reported: list[tuple[dict[int, _End], frozenset[int], dict[int, str]]],
) -> tuple[dict[int, _End], dict[int, str]]:
    """Merge reports: the lowest rank's wins; a save that a rank stopped waiting for has failures and a timeout."""
    running = frozenset[int]().union(*(numbers for _, numbers, _ in reported))
    decided: dict[int, _End] = {}
    late = {rank: text for *_, lateness in reported for rank, text in lateness.items()}
    for number in sorted({number for ends, *_ in reported for number in ends}):
        ends = [each[number] for each, *_ in reported if number in each]
        failures = {rank: text for _, texts in reversed(ends) for rank, text in (texts or {}).items()}
        if number not in running:
            left_out = not failures and any(texts is None for _, texts in ends)
            decided[number] = (ends[0][0], None if left_out else failures)
        elif late:
            late = {**failures, **late}
    return decided, late


def is_storage_failure(error: BaseException) -> bool:
    """Return whether the storage made a save fail, so a later one may succeed; False if a rank was lost."""
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        return bool(causes) and all(cause is not None and is_storage_failure(cause) for cause in causes)
    lost = (CoordinatorLostError, CoordinatorTimeoutError, PeerLostError)
    return isinstance(error, OSError) and not isinstance(error, lost)


class Tolerance:
    """Counter of consecutive failed saves, with background errors that are still to be raised."""

    def __init__(self, ranks: Ranks, limit: int, checkpoint_id: Callable[[int], str]) -> None:
        self._ranks = ranks
        self._checkpoint_id = checkpoint_id
        self._limit = limit
        self.count = 0
        self._owed: list[BaseException] = []

    def succeeded(self) -> None:
        """Reset the count."""
        self.count = 0

    def look_back(self, outcomes: Iterable[Outcome], *, tolerates: bool) -> None:
        """Count the outcomes of background saves; keep errors for `raise_owed`."""
        for outcome in outcomes:
            if outcome.error is None:
                self.succeeded()
            elif tolerates and self.passes(outcome.error):
                self.tell_passed(outcome.step, outcome.error)
            else:
                self.count += not tolerates  # otherwise `passes` has counted it
                if self._owed:
                    self._tell(logging.ERROR, outcome.step, outcome.error, "raised by the next call")
                self._owed.append(outcome.error)

    def raise_owed(self) -> None:
        """Raise the first kept error; the next call raises the next one."""
        if self._owed:
            raise self._owed.pop(0)

    def tell_passed(self, step: int, error: BaseException) -> None:
        """Log a tolerated failure, on the coordinator."""
        self._tell(logging.WARNING, step, error, f"{self.count} of {self._limit} tolerated, training goes on")

    def _tell(self, level: int, step: int, error: BaseException, then: str) -> None:
        if not self._ranks.is_coordinator:
            return
        whole = f"{type(error).__name__}: {error}"
        cause = f" on {error.summary}" if isinstance(error, CheckpointException) else f": {whole.partition(chr(10))[0]}"
        _log.log(level, "save of %s failed%s (%s)", self._checkpoint_id(step), cause, then)
        _log.debug("the failed save of step %d", step, exc_info=error)

    def passes(self, error: BaseException) -> bool:
        """Count a failure, and return whether it is tolerated; the same on all ranks.

        A rank may have only the text of another rank's error, so each rank judges its own causes.

        Ranks: every rank; collective if the error is a `CheckpointException`, which is raised on all ranks.
        """
        self.count += 1
        if not self._limit:
            return False
        if self._ranks.alone:
            return self.count <= self._limit and is_storage_failure(error)
        if not isinstance(error, CheckpointException):
            return False  # the other ranks may know nothing of it, and the ranks that are gone do not answer
        failed = set(error.failures)
        known = {rank: is_storage_failure(cause) for rank, (cause, _) in error.failures.items() if cause is not None}

        def decide(reported: list[dict[int, bool]]) -> bool:
            verdicts = [verdict for each in reported for verdict in each.values()]
            named = {rank for each in reported for rank in each}
            return bool(failed) and failed <= named and all(verdicts) and self.count <= self._limit

        return self._ranks.combine("decide whether the failure passes", lambda: known, decide)
