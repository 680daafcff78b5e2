"""`Backend`: contract of the thread or process that runs the saves of an `AsyncSaver`, and the run of one queued save.

Plug-ins register backends. The backends of this package are in `savers`.
"""

from __future__ import annotations

from typing import Protocol

from dcp_async.queue.job_staging import JobStager
from dcp_async.queue.jobs import SaveJob
from dcp_async.queue.save_agreement import GroupLink
from dcp_async.staging.copy_state import Staged
from dcp_core import Metadata

__all__ = ["Backend", "BackendRun"]


class Backend(Protocol):
    """Contract of a backend, which runs the saves of an `AsyncSaver` in a thread or process.

    Plug-ins register a factory of the backend under a name; the factory is called with a `SaverOptions`.
    """

    shares_memory: bool
    """Whether staged copies must be in memory that another process can map."""

    def warm_up(self, link: GroupLink, staged: Staged | None) -> None:
        """Prepare for a process group's first save; `staged` is a copy of a state dict like those to save, or None."""
        ...

    def before_save(self) -> None:
        """Prepare for a save, in the thread that calls `save`, before the state dict is copied. Must not wait."""
        ...

    def run(self, job: SaveJob) -> Metadata:
        """Run one save, and return the checkpoint's metadata. All calls come from one thread."""
        ...

    def close(self) -> None:
        """Release all resources, such as processes. Garbage collection of the backend must release them too."""
        ...


class BackendRun:
    """Callback that runs a save in the queue's thread.

    Args:
        backend: Backend of the saver.
    """

    copies: JobStager
    """Stager of the saver's jobs."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, job: SaveJob) -> Metadata:
        """Save once the copy is complete; if staging failed, report its error to the other ranks."""
        try:
            self.copies.await_copy(job)
            if job.staged is None and self._backend.shares_memory:
                self.copies.plan_and_copy(job)
        except BaseException as error:
            job.link.withdraw(job.ticket, error)
            raise
        try:
            return self._backend.run(job)
        finally:
            self.copies.await_waves(job)
