"""Which failures of a save may pass by themselves."""

from __future__ import annotations

from dcp_core import CheckpointException, CoordinatorLostError, CoordinatorTimeoutError, PeerLostError

__all__ = ["is_storage_failure"]


def is_storage_failure(error: BaseException) -> bool:
    """Whether the storage is why a save failed: it may work again. Ranks that are gone do not come back."""
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        return bool(causes) and all(cause is not None and is_storage_failure(cause) for cause in causes)
    lost = (CoordinatorLostError, CoordinatorTimeoutError, PeerLostError)
    return isinstance(error, OSError) and not isinstance(error, lost)
