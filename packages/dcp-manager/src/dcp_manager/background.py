"""Bookkeeping of saves in the background: the futures still running, and the errors of those that ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dcp_core import CheckpointException
from dcp_manager.errors import UnfinishedSaveError
from dcp_manager.together import Ranks
from dcp_manifest import library_logger

__all__ = ["BackgroundSaves", "Outcome"]

_log = library_logger(__name__)

# What a saver's future says of a save that its policy for overlaps has left out, by name: savers are other packages'.
_LEFT_OUT = ("SaveSkippedError", "SaveSupersededError")


_Failures = dict[int, tuple[BaseException | None, str]]
# A rank's report of a save that has ended: its step, and what failed on which ranks; None if it was left out.
_End = tuple[int, dict[int, str] | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a save, the same on all ranks."""

    step: int
    error: BaseException | None
    """What it failed with; None if there is a checkpoint."""


@dataclass(frozen=True, slots=True)
class _Save:
    number: int
    step: int
    future: Future[Any]
    settled: threading.Event

    def failures(self, rank: int) -> _Failures | None:
        """Return the failures of a save that has ended, from this rank's future; None if it was skipped."""
        error = None if self.future.cancelled() else self.future.exception()
        if self.future.cancelled() or type(error).__name__ in _LEFT_OUT:
            return None
        return {} if error is None else _failures_of(error, rank)


class BackgroundSaves:
    """The futures of this rank's saves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: list[_Save] = []
        self._begun = 0

    @property
    def steps(self) -> frozenset[int]:
        """Steps of the saves that are running, or whose outcome was not read yet."""
        with self._lock:
            return frozenset(save.step for save in self._saves if not save.settled.is_set())

    def begin(self) -> int:
        """Draw the number of a save, the same on all ranks; a rank may fail before it adds the save."""
        self._begun += 1
        return self._begun

    def add(self, number: int, step: int, future: Future[Any], settle: Callable[[bool], None]) -> None:
        """Watch a save; the callback `settle` gets its success, in the thread where it ended."""
        settled = threading.Event()
        with self._lock:
            self._saves.append(_Save(number, step, future, settled))

        def ended(done: Future[Any]) -> None:
            try:
                settle(not done.cancelled() and done.exception() is None)
            finally:
                settled.set()

        future.add_done_callback(ended)

    def overdue(self, seconds: float, setting: str, where: str) -> UnfinishedSaveError | None:
        """Wait up to `seconds` until all saves have ended and been settled; returns the error for those that have not.

        Args:
            seconds: How long to wait.
            setting: What the caller sets that with.
            where: Whose saves these are.
        """
        end = time.monotonic() + min(seconds, threading.TIMEOUT_MAX)
        with self._lock:
            events = [save.settled for save in self._saves]
        for event in events:
            event.wait(max(0.0, end - time.monotonic()))
        steps = ", ".join(map(str, sorted(self.steps)))
        if not steps:
            return None
        return UnfinishedSaveError(
            f"{where}: the save of step {steps} was still running after {seconds:.1f} s ({setting}); its checkpoint "
            "does not exist yet, earlier ones stay. Allow more time, or look for what holds the storage up"
        )

    def outcomes(self, ranks: Ranks, late: BaseException | None = None) -> tuple[list[Outcome], BaseException | None]:
        """Return the outcomes of saves that have ended on all ranks, each once, in the order in which they began.

        Args:
            ranks: Who saves.
            late: What is to be said of this rank's saves that have not ended.

        Returns:
            The outcomes, and what is to be said of saves that have not ended on some rank; the same on all.

        Ranks: every rank; collective.
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
    """Return the error to raise on this rank for the failures that ranks report; None without failures."""
    if not texts:
        return None
    if own is not None and ranks.alone:
        return own
    error = CheckpointException(what, {rank: (known.get(rank, (None, ""))[0], text) for rank, text in texts.items()})
    error.__cause__ = own
    return error


def _failures_of(error: BaseException, rank: int) -> _Failures:
    """Return the failures by rank, from one rank's future."""
    if isinstance(error, CheckpointException) and error.failures:
        return error.failures
    return {rank: (error, f"{type(error).__name__}: {error}")}


def _joined(
    reported: list[tuple[dict[int, _End], frozenset[int], dict[int, str]]],
) -> tuple[dict[int, _End], dict[int, str]]:
    """Merge the ranks' reports: outcomes of saves that have ended everywhere, and late ranks.

    The lowest rank's report wins.

    One that still runs somewhere is not looked at: only when it has ended everywhere is it known of each rank what its
    failure was. If a rank stops waiting for it, the failures of others are reported with its timeout.
    """
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
