"""Errors of saves in the background, in addition to those of any save."""

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
    """The state does not fit into the memory limit of staging."""


class MutatedWhileStagedError(DcpError, RuntimeError):
    """A tensor changed while it was copied: the copy may mix old and new values."""


class StagingMismatchError(DcpError, RuntimeError):
    """The staged copy of a tensor does not match its description; the copy is not used."""


class NestedSaveError(DcpError, RuntimeError):
    """A thread started a save while it was already starting another one."""


class SaveSkippedError(DcpError, RuntimeError):
    """This save was skipped, because an earlier one was still running and the policy is `skip`."""


class SaveSupersededError(DcpError, RuntimeError):
    """This save was superseded by a later one before it began; the policy is `latest`."""


class SaverClosedError(DcpError, RuntimeError):
    """The saver is closed, and takes no more saves."""


class SaverDeadlineError(DcpError, TimeoutError):
    """A save, or waiting for all saves, exceeded its deadline."""


class WorkerError(DcpError, RuntimeError):
    """The worker process could not be started, or could not receive what it needs."""


class WorkerLostError(DcpError, ConnectionError):
    """The worker process ended, or stopped responding, during a save; the next save starts another one."""
