"""Backends of asynchronous savers, and the thread backend, which competes with training for the GIL."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from dcp_async.options import SaverOptions
from dcp_async.queue.job_staging import JobStager
from dcp_async.queue.jobs import SaveJob
from dcp_async.queue.save_agreement import GroupLink
from dcp_async.staging.copy_state import Staged
from dcp_async.staging.waves import WaveFeed, WavePlanner, reserve_addresses
from dcp_core import Metadata, SavePlanner
from dcp_core.saving import save_with


class Backend(Protocol):
    """Runs the saves of an `AsyncSaver`, in a thread or process."""

    shares_memory: bool
    """Whether staged copies must be in memory that another process can map."""

    def warm_up(self, link: GroupLink, staged: Staged | None) -> None:
        """Prepare for a group's first save; `staged` is a copy of a similar state dict, if given."""
        ...

    def before_save(self) -> None:
        """Prepare for a save, before the copy, in the caller's thread. Must not wait."""
        ...

    def run(self, job: SaveJob) -> Metadata:
        """Run one save; return the metadata. All calls come from one thread."""
        ...

    def close(self) -> None:
        """Release all resources, such as processes. Garbage collection must release them too."""
        ...


class BackendRun:
    """Callback that runs a save in the queue's thread."""

    copies: JobStager

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, job: SaveJob) -> Metadata:
        """Save once the copy is complete; report a staging error to other ranks."""
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


class ThreadBackend:
    """Backend that runs saves in the saver's thread."""

    shares_memory = False

    def __init__(self, options: SaverOptions) -> None:
        del options

    def warm_up(self, link: GroupLink, staged: Staged | None) -> None:
        """Do nothing."""

    def before_save(self) -> None:
        """Do nothing."""

    def run(self, job: SaveJob) -> Metadata:
        """Save in the calling thread, without collectives on the trainer's process group."""
        with contextlib.ExitStack() as ends:
            try:
                state, planner = _staged(job, ends)
                coordinator = job.link.coordinator(job.ticket)
            except BaseException as error:
                job.link.withdraw(job.ticket, error)
                raise
            return save_with(
                coordinator,
                state,
                checkpoint_id=job.checkpoint_id,
                storage_writer=job.storage_writer,
                planner=planner,
                use_collectives=job.use_collectives,
                group=job.link.seat.key,
            )

    def close(self) -> None:
        """Do nothing."""


def _staged(job: SaveJob, ends: contextlib.ExitStack) -> tuple[dict[str, Any], SavePlanner | None]:
    if job.staged is None:
        return job.staged_state or {}, job.planner
    structure, waves = job.staged.structure, job.staged.waves
    if waves is None:
        return job.staged.state_dict(), job.planner
    addresses = reserve_addresses(structure.wave_bytes)
    memory, resident_bytes = job.staged.arena.view(), structure.resident_bytes
    feed = WaveFeed(waves.saver_end, memory, resident_bytes, waves.piece_bytes, addresses, waves.digests)
    ends.callback(feed.close)
    return job.staged.state_dict(addresses), WavePlanner.of(job.planner, feed)
