"""Which failures of a save may pass by themselves, and how many in a row may: one decision for all ranks."""

from __future__ import annotations

from dcp_core import CheckpointException, CoordinatorLostError, CoordinatorTimeoutError, PeerLostError
from dcp_manager.together import Ranks

__all__ = ["Tolerance", "is_storage_failure"]


def is_storage_failure(error: BaseException) -> bool:
    """Whether the storage is why a save failed: it may work again. Ranks that are gone do not come back."""
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        return bool(causes) and all(cause is not None and is_storage_failure(cause) for cause in causes)
    lost = (CoordinatorLostError, CoordinatorTimeoutError, PeerLostError)
    return isinstance(error, OSError) and not isinstance(error, lost)


class Tolerance:
    """Counts failures in a row.

    Args:
        ranks: Who saves.
        limit: How many failures of the storage in a row may pass.
    """

    def __init__(self, ranks: Ranks, limit: int) -> None:
        self._ranks = ranks
        self._limit = limit
        self.count = 0
        """Of failures since the last success."""

    def succeeded(self) -> None:
        """A save went well."""
        self.count = 0

    def passes(self, error: Exception) -> bool:
        """Whether training goes on after one more failure; the same on all ranks.

        A rank often has of another one's failure its text alone, so each says of which causes it knows what they are,
        and the coordinator decides.

        Ranks: every rank if the error is one of all ranks, a `CheckpointException`; others are not asked about.
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

        def decide(told: list[dict[int, bool]]) -> bool:
            verdicts = [verdict for each in told for verdict in each.values()]
            named = {rank for each in told for rank in each}
            return bool(failed) and failed <= named and all(verdicts) and self.count <= self._limit

        return self._ranks.combine("decide whether the failure passes", lambda: known, decide)
