"""Exceptions of asynchronous saves, in addition to the exceptions of synchronous saves."""

from __future__ import annotations

from dcp_core import DcpError


class StagingMismatchError(DcpError, RuntimeError):
    """A tensor changed during the copy, or its copy does not match its description; nothing is saved."""


class SaverClosedError(DcpError, RuntimeError):
    """The saver is closed and accepts no more saves."""


class SaverDeadlineError(DcpError, TimeoutError):
    """A save, a copy, or the wait for earlier saves exceeded its limit, such as `SaverOptions.save_timeout_seconds`."""


class WorkerError(DcpError, RuntimeError):
    """The worker process could not start, or an object for it could not be pickled or unpickled."""


class WorkerLostError(DcpError, ConnectionError):
    """The worker process ended or stopped responding during a save; the next save starts a new process."""
