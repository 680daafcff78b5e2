"""Exceptions of asynchronous saves, in addition to the exceptions of synchronous saves."""

from __future__ import annotations

from dcp_core import DcpError

__all__ = [
    "MutatedWhileStagedError",
    "NestedSaveError",
    "SaveSkippedError",
    "SaveSupersededError",
    "SaverClosedError",
    "SaverDeadlineError",
    "StagingLimitError",
    "StagingMismatchError",
    "WorkerError",
    "WorkerLostError",
]


class StagingLimitError(DcpError, MemoryError):
    """The copy of a state dict would exceed the memory limit of staging, `max_staging_bytes`."""


class MutatedWhileStagedError(DcpError, RuntimeError):
    """A tensor changed while it was being staged, so the copy may mix old and new elements; nothing is saved."""


class StagingMismatchError(DcpError, RuntimeError):
    """A staged copy does not match the recorded dtype, shape, strides or memory of its tensor; nothing is saved."""


class NestedSaveError(DcpError, RuntimeError):
    """A thread started a save while it was already starting another save, for example in a `state_dict()` method."""


class SaveSkippedError(DcpError, RuntimeError):
    """A save was skipped because an earlier save was still running; the overlap policy is `skip`."""


class SaveSupersededError(DcpError, RuntimeError):
    """A queued save was replaced by a later save before it began; the overlap policy is `latest`."""


class SaverClosedError(DcpError, RuntimeError):
    """The saver is closed and accepts no more saves."""


class SaverDeadlineError(DcpError, TimeoutError):
    """A save, a copy, or the wait for earlier saves took longer than its limit, such as `SaverOptions.save_seconds`."""


class WorkerError(DcpError, RuntimeError):
    """The worker process of a saver could not be started, or an object for it could not be pickled or unpickled."""


class WorkerLostError(DcpError, ConnectionError):
    """The worker process of a saver ended or stopped responding during a save; the next save starts a new process."""
