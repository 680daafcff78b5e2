"""What can go wrong with a save in the background, beside what goes wrong with any save."""

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
    """A state does not fit into the memory that staging may take."""


class MutatedWhileStagedError(DcpError, RuntimeError):
    """A tensor changed while it was copied: the copy may hold old and new values side by side."""


class StagingMismatchError(DcpError, RuntimeError):
    """What was copied of a tensor is not what its description says: the copy is not used."""


class NestedSaveError(DcpError, RuntimeError):
    """A thread started a save while it was starting one."""


class SaveSkippedError(DcpError, RuntimeError):
    """This save was left out, because an earlier one was still running and the policy is `skip`."""


class SaveSupersededError(DcpError, RuntimeError):
    """This save was left out, because a later one came before it could begin and the policy is `latest`."""


class SaverClosedError(DcpError, RuntimeError):
    """The saver takes no more saves."""


class SaverDeadlineError(DcpError, TimeoutError):
    """A save, or the draining of all saves, took longer than it may."""


class WorkerError(DcpError, RuntimeError):
    """The saver's process could not be started, or cannot be given what it needs."""


class WorkerLostError(DcpError, ConnectionError):
    """The saver's process ended, or went silent, while it saved; the next save starts another one."""
