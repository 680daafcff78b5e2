"""Record of the saves in the background: futures of running saves, and errors of saves that have ended."""

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
    """Outcome of a background save, the same on all ranks: its error, or None after a success."""

    step: int
    error: BaseException | None
    """Error of the failed save; None if the save succeeded."""


@dataclass(frozen=True, slots=True)
class _Save:
    number: int
    step: int
    future: Future[Any]
    settled: threading.Event

    def failures(self, rank: int) -> _Failures | None:
        """Return the failures by rank, from this rank's future of an ended save; None if the save was skipped."""
        error = None if self.future.cancelled() else self.future.exception()
        if self.future.cancelled() or type(error).__name__ in _LEFT_OUT:
            return None
        return {} if error is None else _failures_of(error, rank)


class BackgroundSaves:
    """Futures and outcomes of this rank's background saves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: list[_Save] = []
        self._begun = 0

    @property
    def steps(self) -> frozenset[int]:
        """Steps of the saves that are running, or whose outcome `outcomes` has not returned yet."""
        with self._lock:
            return frozenset(save.step for save in self._saves if not save.settled.is_set())

    def begin(self) -> int:
        """Return the number of a new save, which is equal on all ranks, even if a rank fails before it calls `add`."""
        self._begun += 1
        return self._begun

    def add(self, number: int, step: int, future: Future[Any], settle: Callable[[bool], None]) -> None:
        """Add a running save, and call `settle` when it ends.

        Args:
            number: Number of the save, from `begin`.
            step: Training step of the save.
            future: Future of the save.
            settle: Callback with True if the save succeeded, else False; runs in the thread that completes the future.
        """
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
        """Wait until all saves have ended and `settle` has run for each.

        Returns an error, which is not raised, if a save has not ended after `seconds`; otherwise None.

        Args:
            seconds: Maximum time to wait.
            setting: Name of the option that sets the limit, for the error message.
            where: Text with the rank and the root of the saves, for the error message.
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
        """Return the outcomes of saves that have ended on all ranks, in the order of their begin; each only once.

        Args:
            ranks: The ranks that save.
            late: Error of `overdue` for this rank's saves; None if no save is overdue.

        Returns:
            The outcomes, which are the same on all ranks; and an error if any rank passed `late`, else None.

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
    """Return the failures by rank that the error of one rank's future contains."""
    if isinstance(error, CheckpointException) and error.failures:
        return error.failures
    return {rank: (error, f"{type(error).__name__}: {error}")}


def _joined(
    reported: list[tuple[dict[int, _End], frozenset[int], dict[int, str]]],
) -> tuple[dict[int, _End], dict[int, str]]:
    """Merge the ranks' reports: outcomes of saves that have ended everywhere, and late ranks.

    The lowest rank's report wins.

    A save that still runs on some rank is left out, since not all of its failures are known yet. But if a rank has
    stopped waiting for saves, the failures of this save on other ranks are reported together with the timeout.
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
