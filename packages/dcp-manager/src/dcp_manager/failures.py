"""Tolerance of failed saves: which failures may be transient, and how many consecutive failures are tolerated."""

from __future__ import annotations

from collections.abc import Iterable

from dcp_core import CheckpointException, CoordinatorLostError, CoordinatorTimeoutError, PeerLostError
from dcp_manager.background import Outcome
from dcp_manager.together import Ranks
from dcp_manifest import library_logger

__all__ = ["Tolerance", "is_storage_failure"]

_log = library_logger(__name__)


def is_storage_failure(error: BaseException) -> bool:
    """Whether a save failed because of the storage, so a later save may succeed; False if a rank was lost."""
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        return bool(causes) and all(cause is not None and is_storage_failure(cause) for cause in causes)
    lost = (CoordinatorLostError, CoordinatorTimeoutError, PeerLostError)
    return isinstance(error, OSError) and not isinstance(error, lost)


class Tolerance:
    """Counter of consecutive failed saves; it also keeps errors of background saves until they are raised.

    Args:
        ranks: The ranks that save.
        limit: Number of consecutive storage failures that are tolerated.
    """

    def __init__(self, ranks: Ranks, limit: int) -> None:
        self._ranks = ranks
        self._limit = limit
        self.count = 0
        """Number of failures since the last success."""
        self._owed: list[BaseException] = []

    def succeeded(self) -> None:
        """Reset the count after a successful save."""
        self.count = 0

    def look_back(self, outcomes: Iterable[Outcome], *, tolerates: bool) -> None:
        """Count the outcomes of background saves; errors that are not tolerated are kept for `raise_owed`.

        Args:
            outcomes: Outcomes of saves, in the order in which the saves began; the same on all ranks.
            tolerates: Whether storage failures within the limit are tolerated.

        Ranks: every rank.
        """
        for outcome in outcomes:
            if outcome.error is None:
                self.succeeded()
            elif tolerates and self.passes(outcome.error):
                self.tell_passed(outcome.step, outcome.error)
            else:
                self.count += not tolerates  # else it has been counted
                if self._owed:
                    _log.error(
                        "saving step %d failed as well; the next call raises it: %s", outcome.step, outcome.error
                    )
                self._owed.append(outcome.error)

    def raise_owed(self) -> None:
        """Raise the first error that `look_back` kept; the next call raises the next error."""
        if self._owed:
            raise self._owed.pop(0)

    def tell_passed(self, step: int, error: BaseException) -> None:
        """Log the tolerated failure of a save."""
        _log.warning("saving step %d failed, training goes on (failure %d): %s", step, self.count, error)

    def passes(self, error: BaseException) -> bool:
        """Count a failure, and return whether it is tolerated; the same on all ranks.

        A rank often has only the text of another rank's error. So each rank reports which of the causes that it has as
        exceptions are storage failures, and the coordinator decides.

        Ranks: every rank if the error is a `CheckpointException`, which is raised on all ranks; collective. For other
            errors no rank communicates.
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
