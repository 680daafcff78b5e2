"""Saves that a saver carries out in the background: which are under way, and what went wrong with those that ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dcp_core import CheckpointException
from dcp_manager.errors import UnfinishedSaveError
from dcp_manager.together import Ranks

__all__ = ["BackgroundSaves"]

_log = logging.getLogger(__name__)

# What a saver's future says of a save that its policy for overlaps has left out, by name: savers are other packages'.
_LEFT_OUT = ("SaveSkippedError", "SaveSupersededError")


class BackgroundSaves:
    """The futures of this rank's saves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: list[tuple[int, Future[Any]]] = []
        self._settled: dict[Future[Any], threading.Event] = {}

    @property
    def steps(self) -> frozenset[int]:
        """Those that have not ended, or whose end nobody has looked at."""
        with self._lock:
            return frozenset(step for step, future in self._futures if not self._settled[future].is_set())

    def add(self, step: int, future: Future[Any], settle: Callable[[bool], None]) -> None:
        """Watch a save; `settle` is told whether it succeeded, in the thread where it ended."""
        settled = threading.Event()
        with self._lock:
            self._futures.append((step, future))
            self._settled[future] = settled

        def ended(done: Future[Any]) -> None:
            try:
                settle(not done.cancelled() and done.exception() is None)
            finally:
                settled.set()

        future.add_done_callback(ended)

    def overdue(self, seconds: float, setting: str, where: str) -> UnfinishedSaveError | None:
        """Wait until all have ended and been settled, or for so many seconds: what to raise about those that have not.

        Args:
            seconds: How long to wait.
            setting: What the caller sets that with.
            where: Whose saves these are.
        """
        end = time.monotonic() + min(seconds, threading.TIMEOUT_MAX)
        with self._lock:
            events = list(self._settled.values())
        for event in events:
            event.wait(max(0.0, end - time.monotonic()))
        steps = ", ".join(map(str, sorted(self.steps)))
        if not steps:
            return None
        return UnfinishedSaveError(
            f"{where}: the save of step {steps} was still running after {seconds:.1f} s ({setting}); its checkpoint "
            "does not exist yet, earlier ones stay. Allow more time, or look for what holds the storage up"
        )

    def raise_failures(self, ranks: Ranks, *, waits: bool, late: BaseException | None = None) -> None:
        """Raise what a save that ended has failed with, the same on all ranks; each failure once.

        Args:
            ranks: Who saves.
            waits: Whether ranks ask each other: only if they all do.
            late: What is to be said of this rank's saves that have not ended, if nothing has failed.
        """
        own = self._failures() or ([] if late is None else [late])
        if not waits:
            return
        failures = {} if not own else _failures_of(own[0], ranks.rank)
        texts = {rank: text for rank, (_, text) in failures.items()}
        told = ranks.combine("ask for failed saves", lambda: texts, _joined)
        if own and ranks.alone:
            raise own[0]
        if told:
            causes = {rank: (failures.get(rank, (None, ""))[0], text) for rank, text in told.items()}
            raise CheckpointException("a save in the background failed", causes) from (own[0] if own else None)

    def _failures(self) -> list[BaseException]:
        """Of saves that ended; they are forgotten."""
        found: list[BaseException] = []
        with self._lock:
            ended = [(step, future) for step, future in self._futures if self._settled[future].is_set()]
            for step, future in ended:
                self._futures.remove((step, future))
                del self._settled[future]
                error = None if future.cancelled() else future.exception()
                if future.cancelled() or type(error).__name__ in _LEFT_OUT:
                    _log.info("the save of step %d was left out, since another one was running", step)
                elif error is not None:
                    found.append(error)
        return found


def _failures_of(error: BaseException, rank: int) -> dict[int, tuple[BaseException | None, str]]:
    """What failed on which rank, as far as one rank's future tells."""
    if isinstance(error, CheckpointException) and error.failures:
        return error.failures
    return {rank: (error, f"{type(error).__name__}: {error}")}


def _joined(told: list[dict[int, str]]) -> dict[int, str]:
    """The failures that any rank knows of; of those that several know what the first one says."""
    return {rank: text for each in reversed(told) for rank, text in each.items()}
