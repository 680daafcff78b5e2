"""`AsyncSaver`: copies state dicts and saves the copies in the background, one at a time.

A `Backend` (thread or process, in `queue.backend`) runs the saves. The copies are made in `staging`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dcp_async.errors import SaverClosedError, SaverDeadlineError
from dcp_async.options import AsyncCheckpointerType, Overlap, SaverOptions, check_overlap, saver_name
from dcp_async.queue.backend import Backend, BackendRun
from dcp_async.queue.job_staging import JobStager
from dcp_async.queue.jobs import AsyncSaveResponse, SaveFuture, SaveJob
from dcp_async.queue.save_agreement import LinkTable
from dcp_async.queue.save_queue import SaveQueue, check_policy
from dcp_async.queue.start_lock import Entry
from dcp_async.queue.trainer_environment import Surroundings
from dcp_async.saver_ends import naming_the_end, warn_dropped
from dcp_async.staging.arena_pool import ArenaPool
from dcp_async.staging.copy_state import Stager
from dcp_async.staging.copying import Copier
from dcp_async.staging.mutation_guard import MutationGuard
from dcp_async.staging.placement import Budget
from dcp_core import (
    AsyncStager,
    CheckpointNotFoundError,
    Metadata,
    SavePlanner,
    StorageWriter,
    plugins,
)
from dcp_core.toolkit import CheckpointId, absolute_id_for, outside_compile, without_positional_path

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AsyncSaver"]


class AsyncSaver:
    """Asynchronous saver: copies state dicts and saves them in the background. A context manager that closes itself.

    Args:
        kind: `AsyncCheckpointerType.PROCESS`, `AsyncCheckpointerType.THREAD`, or the name of a saver from a plug-in.
        overlap: Policy for a new save while an earlier one runs: `wait`, `skip` or `latest`; see `async_save`.
        options: Options of the saver; None for the defaults of `SaverOptions`.

    Saves of one saver run one at a time, in the order in which they were started. One saver may serve several process
    groups, models and checkpoint ids; ranks that are in several groups must start their saves in the same order.

    Example:
        ```python
        import torch
        from dcp_async import AsyncSaver

        weights = torch.zeros(1000)
        with AsyncSaver("thread") as saver:  # "process", the default, leaves the interpreter to the training
            for step in range(1, 4):
                weights += 1
                saver.save({"weights": weights}, checkpoint_id=f"step-{step}")
        ```
    """

    def __init__(
        self,
        kind: AsyncCheckpointerType | str = AsyncCheckpointerType.PROCESS,
        *,
        overlap: Overlap = "wait",
        options: SaverOptions | None = None,
    ) -> None:
        check_overlap(overlap)
        self.options = options or SaverOptions()
        self._overlap: Overlap = overlap
        name = saver_name(kind)
        self._backend: Backend = plugins.saver(name)(self.options)
        self._links = LinkTable(self.options)
        self._pool = ArenaPool(
            shared=self._backend.shares_memory,
            pinned=self.options.pin_memory,
            max_bytes=self.options.max_staging_bytes,
        )
        guard = MutationGuard() if self.options.mutation_guard else None
        stager = Stager(self._pool, Copier(self.options.copy_threads), guard, Budget.of(self.options))
        self._seconds = min(self.options.save_seconds, threading.TIMEOUT_MAX)
        self._entry = Entry()
        run = BackendRun(self._backend)
        # None of what carries saves out holds this object: one that is dropped is freed at once.
        self._queue = SaveQueue(run, f"dcp-{name}-saver", self.options.save_seconds)
        run.copies = self._copies = JobStager(stager, self._entry, self._seconds, self._queue.wait_turn)
        self.bytes_to_stage = self._copies.bytes_to_stage
        """Function that returns the memory for the copy of a state dict on this rank, in bytes, without copying."""
        self.bytes_to_wait_for = self._copies.bytes_to_wait_for
        """Function that returns how many bytes of it the storage takes before `save` returns; 0 without waves."""
        self._owner = os.getpid()
        self._warning = weakref.finalize(self, warn_dropped, name, self._owner)
        self._warning.atexit = False

    @property
    def closed(self) -> bool:
        """Whether the saver is closed, or belongs to the parent process of a fork: `save` then raises."""
        return self._queue.closed or self._owner != os.getpid()

    @property
    def staging_bytes(self) -> int:
        """Size in bytes of the memory for staged copies, including memory kept for the next copy."""
        return self._pool.nbytes

    @property
    def backend(self) -> Backend:
        """The backend that runs the saves, such as a `ThreadBackend`."""
        return self._backend

    def warm_up(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        state_dict: dict[str, Any] | None = None,
        checkpoint_id: CheckpointId | None = None,
        no_dist: bool = False,
    ) -> None:
        """Prepare for the first save: start the worker process, and return when the process is ready.

        Args:
            process_group: Process group of the ranks that will save together; None for all ranks.
            state_dict: State dict like those that will be saved. If given, memory for a copy is allocated, and the
                structure of the state dict is sent to the worker.
            checkpoint_id: Checkpoint id of a save that will follow; only needed with a `state_dict`, and a storage that
                keeps checkpoints in memory, which lends the memory for the copy.
            no_dist: Whether saves will be from this process alone.

        Raises:
            WorkerError: The worker process cannot be started.
            SaverClosedError: The saver is closed.
            Exception: `state_dict` cannot be staged.

        Ranks: every rank of the group; does not wait for other ranks, only for this rank's own earlier saves.
        """
        self._check_open()
        link = self._links.of(process_group, no_dist=no_dist)
        self._enter(None, wait=True)
        try:
            self._backend.before_save()
            if state_dict is None:
                self._backend.warm_up(link, None)
                return
            staged = self._copies.stage_now(state_dict, link, checkpoint_id)
            try:
                self._backend.warm_up(link, staged)
            finally:
                self._copies.give_back(staged)
        finally:
            self._entry.leave()

    @without_positional_path
    @outside_compile
    def save(
        self,
        state_dict: dict[str, Any],
        *,
        checkpoint_id: CheckpointId | None = None,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        process_group: dist.ProcessGroup | None = None,
        async_stager: AsyncStager | None = None,
        no_dist: bool = False,
        use_collectives: bool = True,
        overlap: Overlap | None = None,
    ) -> Future[Metadata] | AsyncSaveResponse:
        """Copy a state dict and save the copy in the background.

        Args:
            state_dict: State dict, as for `dcp_core.save`. Without `async_stager`, its tensors and objects may be
                changed as soon as `save` returns.
            checkpoint_id: Path or URI of the checkpoint. A relative path is resolved at the time of this call.
            storage_writer: Storage writer to use instead of the one that the scheme of `checkpoint_id` selects; a
                process saver uses a copy of the writer.
            planner: Save planner, as for `dcp_core.save`. A process saver runs a copy of a `DefaultSavePlanner` in the
                worker; of all other planners, subclasses included, the methods that access tensors run in this process.
            process_group: Process group of the ranks that save together; None for all ranks.
            async_stager: Stager that copies the state dict; None for the storage writer if it is a stager, else for the
                saver's stager. If `stage` returns a future, `save` may return before the copy is complete.
            no_dist: Whether to save from this process alone.
            use_collectives: Whether ranks plan together; with False, every rank plans alone (see `dcp_core.save`).
            overlap: Overlap policy of this save; None for the saver's policy.

        Returns:
            Future of the checkpoint's metadata, done when the checkpoint is published; with a stager that returns
            futures, an `AsyncSaveResponse`, which has a second future for the copy.

        Raises:
            Exception: The copy failed, or an earlier save failed and its future was never read. The futures of the
                other ranks raise the error of the copy, too.
            SaverClosedError: The saver is closed.
            SaverDeadlineError: An earlier save of this rank, or a thread in `lock`, takes longer than `save_seconds`.
            NestedSaveError: This thread is already starting a save, for example in the `state_dict()` of an object.
            RankDisagreementError: Another rank uses another `overlap` policy.

        Ranks: every rank of the group; does not wait for other ranks, only for this rank's own earlier saves if the
            policy is `wait`.
        """
        policy = self._overlap if overlap is None else overlap
        check_overlap(policy)
        self._check_open()
        surroundings = Surroundings.now()
        link = self._links.of(process_group, no_dist=no_dist)
        try:
            place = None if checkpoint_id is None else absolute_id_for(storage_writer, checkpoint_id)
            self._enter(checkpoint_id, wait=policy == "wait" or not link.agrees)
        except (SaverDeadlineError, CheckpointNotFoundError) as error:
            link.withdraw(link.draw(), error)
            raise
        try:
            with naming_the_end():
                self._backend.before_save()
            job = SaveJob(link, link.take_number(policy), place, storage_writer, planner, use_collectives)
            job.surroundings, job.group_store = surroundings, link.group_store()
            job.may_be_superseded = policy == "latest" and link.agrees
            return self._start(job, policy, state_dict, async_stager)
        finally:
            self._entry.leave()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Context manager for changing tensors: waits until no copy is in progress, and delays saves of other threads.

        Only needed with a stager that returns futures; with other stagers, the copy is complete when `save` returns. If
        this thread calls `save` inside the block, the copy is complete when `save` returns, with every stager.
        """
        self._check_here()
        with self._entry.lock():
            yield

    def wait(self, seconds: float | None = None) -> None:
        """Wait until every save has ended, successfully or not.

        Raises SaverDeadlineError after `seconds` (None: `SaverOptions.save_seconds`).
        """
        self._check_here()
        self._queue.drain(self.options.save_seconds if seconds is None else seconds)

    def close(self, seconds: float | None = None) -> None:
        """Wait for all saves, end the thread or worker process, and raise errors of saves whose futures were not read.

        In a forked child process, `close` does nothing: the saver belongs to the parent.

        Args:
            seconds: Longest time in seconds to wait; None for `SaverOptions.close_seconds`.

        Raises:
            SaverDeadlineError: A save has not ended within `seconds`; the saves are then ended as by `end`.
            Exception: An earlier save failed, and its future was never read; further errors are logged.
        """
        if self._owner != os.getpid():
            return
        self._queue.close()
        try:
            self._queue.drain(self.options.close_seconds if seconds is None else seconds)
        finally:
            self.end()
        error = self._queue.next_unasked()
        self.log_unasked()
        if error is not None:
            raise error

    def log_unasked(self) -> None:
        """Log all errors of failed saves whose futures were not read, and mark them as read."""
        self._queue.log_unasked()

    def end(self) -> None:
        """Close the saver without waiting for its saves, and end the worker process.

        A queued save is cancelled: its future raises SaverClosedError. A save that runs in the worker process ends with
        the process, and its checkpoint is not published. A save that runs in a thread cannot be ended: it continues,
        its future gets the result, and the interpreter waits for the thread before it exits.
        """
        self._warning.detach()
        if self._owner != os.getpid():
            return
        self._queue.close()
        self._queue.drop()
        self._backend.close()
        self._copies.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(Exception):  # the error that is under way matters more
            self.close()

    def _enter(self, place: CheckpointId | None, *, wait: bool) -> None:
        """Acquire the start lock; with `wait`, first wait for all earlier saves, without holding a lock.

        Raises SaverDeadlineError if this takes longer than `save_seconds`.
        """
        while True:
            if wait:
                self._queue.wait_turn()
            if not self._entry.enter(self._seconds):
                raise SaverDeadlineError(
                    f"the save to {place!s} could not begin within {self._seconds:g} s (save_seconds): another thread "
                    "is in `lock`, or is starting a save"
                )
            if not (wait and self._queue.busy):  # another thread may have been first
                return
            self._entry.leave()

    def _start(
        self, job: SaveJob, policy: Overlap, state_dict: dict[str, Any], stager: AsyncStager | None
    ) -> SaveFuture | AsyncSaveResponse:
        """Stage and queue a save, if the policy admits it."""
        try:
            check_policy(job, policy)
            self._queue.raise_unasked()
            if not self._queue.admit(job, policy):
                return job.future
            self._queue.raise_unasked()
            with naming_the_end():
                answer = self._copies.stage(job, state_dict, stager)
                self._queue.put(job)
            self._copies.finish(job)
        except BaseException as error:
            self._copies.abandon(job, error)
            job.release()
            job.link.withdraw(job.ticket, error)
            raise
        return answer

    def _check_open(self) -> None:
        self._check_here()
        self._queue.check_open()

    def _check_here(self) -> None:
        if self._owner != os.getpid():
            raise SaverClosedError(
                f"this saver is the process {self._owner}'s, of which this one was forked: make another one here. Its "
                "threads, its worker and its memory for copies are not in this process"
            )
