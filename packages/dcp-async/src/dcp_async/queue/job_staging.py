"""Staging of one asynchronous save: chooses the stager and the thread, and prepares the copy for custom planners.

Not in this module: how tensors are copied (`staging`), and which save may begin (`save_queue`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from dcp_async.errors import SaverDeadlineError
from dcp_async.queue.copy_report import report_copy
from dcp_async.queue.jobs import AsyncSaveResponse, SaveFuture, SaveJob
from dcp_async.queue.lenders import lender_for
from dcp_async.queue.save_agreement import GroupLink
from dcp_async.queue.start_lock import Entry
from dcp_async.queue.worker_planner import plan_here
from dcp_async.staging.copy_state import Staged, Stager
from dcp_async.staging.copying import on_this_stream
from dcp_async.staging.stagers import DefaultStager, is_plain_blocking
from dcp_async.staging.wave_source import WaveSource
from dcp_core import AsyncStager, DefaultSavePlanner, StorageWriter
from dcp_core.toolkit import CheckpointId, with_rank_values, with_states

__all__ = ["JobStager"]


class JobStager:
    """Copier that copies to host memory the state dicts that one saver saves.

    Args:
        stager: Stager that copies the state dicts.
        entry: Lock of the saver for the start of saves; the caller of `stage` holds it.
        seconds: Longest time in seconds that `await_copy` waits, and that `copy_in_waves` takes.
        free_memory: Method that waits for earlier saves, so that their copies' memory can be used for waves. It is held
            weakly: its queue holds this object, and must be freed with its saver.
    """

    def __init__(self, stager: Stager, entry: Entry, seconds: float, free_memory: Callable[[], object]) -> None:
        self._stager = stager
        self._entry = entry
        self._seconds = seconds
        self._wait_for_saves = weakref.WeakMethod(free_memory)
        self._thread: ThreadPoolExecutor | None = None

    def stage_now(self, state_dict: dict[str, Any], link: GroupLink, checkpoint_id: CheckpointId | None) -> Staged:
        """Stage a state dict without a save, as a warm-up; the caller must pass the copy to `give_back` afterwards."""
        values, lender = _values(state_dict, link), lender_for(checkpoint_id)
        return self._stager.stage(values, in_waves=True, free_memory=self._free_memory, lender=lender)

    def bytes_to_stage(self, state_dict: dict[str, Any]) -> int:
        """Return the size in bytes of the memory that a copy of a state dict takes, without copying."""
        return self._stager.measure(with_states(state_dict))[0]

    def bytes_to_wait_for(self, state_dict: dict[str, Any]) -> int:
        """Return the number of bytes that the storage must have taken before `save` returns, without copying."""
        return self._stager.measure(with_states(state_dict))[1]

    def _free_memory(self) -> None:
        wait_for_saves = self._wait_for_saves()
        if wait_for_saves is not None:
            wait_for_saves()

    def give_back(self, staged: Staged) -> None:
        """Return the memory of a copy to the pool."""
        if staged.waves is not None:
            staged.waves.close()
        self._stager.pool.give_back(staged.arena)

    def stage(
        self, job: SaveJob, state_dict: dict[str, Any], stager: AsyncStager | None
    ) -> SaveFuture | AsyncSaveResponse:
        """Stage the state dict of a save: before returning, or in a thread if the stager is asynchronous.

        Args:
            job: Save whose state dict is staged.
            state_dict: State dict to stage.
            stager: Stager that the caller passed; None for the storage writer if it is a stager, else for the saver's
                stager.

        Returns:
            Future of the save; an `AsyncSaveResponse` if the stager is asynchronous.

        Raises:
            Exception: A tensor or object cannot be staged, or the caller's stager failed.
        """
        job.copy_begun = time.monotonic()
        try:
            return self._begin_copy(job, state_dict, stager)
        except BaseException as error:
            job.staging.set_exception(error)
            raise

    def _begin_copy(
        self, job: SaveJob, state_dict: dict[str, Any], stager: AsyncStager | None
    ) -> SaveFuture | AsyncSaveResponse:
        job.adopt()
        values = _values(state_dict, job.link)
        chosen = stager if stager is not None else _stager_of(job.storage_writer)
        if chosen is None or (isinstance(chosen, DefaultStager) and not chosen.config.use_async_staging):
            self._copy(job, values)
            self._end_copy(job)
            return job.future
        if isinstance(chosen, DefaultStager):
            return self._copy_later(job, values)
        staged = chosen.stage(values)
        if isinstance(staged, Future):
            staged.add_done_callback(lambda done: _take_staged(job, done))
            return AsyncSaveResponse(job.staging, job.future)
        job.staged_state = staged
        if chosen.should_synchronize_after_execute:
            chosen.synchronize_staging()
        job.staging.set_result(None)
        return job.future

    def _copy_for_worker(self, job: SaveJob, values: dict[str, Any], *, in_waves: bool = False) -> None:
        nested = bool(getattr(job.planner, "flatten_state_dict", True))
        free_memory = self._free_memory if in_waves and self._stager.budget is not None else None
        lender = lender_for(job.checkpoint_id, job.storage_writer)
        job.staged = staged = self._stager.stage(
            values, nested=nested, in_waves=in_waves, free_memory=free_memory, lender=lender
        )
        job.done.append(lambda: self.give_back(staged))

    def _end_copy(self, job: SaveJob) -> None:
        """Mark a copy as complete, unless a part of it will be made in waves."""
        job.waves = None if job.staged is None else job.staged.waves
        if job.waves is None:
            self._set_copied(job)
        else:
            job.copied.set_result(None)

    def _set_copied(self, job: SaveJob) -> None:
        job.staging.set_result(None)
        if self._stager.budget is not None:
            report_copy(job)

    def finish(self, job: SaveJob) -> None:
        """Copy the rest of the state dict in waves, while the queued save writes it; does nothing without waves.

        If the save itself fails meanwhile, this function returns, and the future has the error.

        Raises:
            SaverDeadlineError: The storage did not take what does not fit in time; the save fails.
            Exception: A tensor could not be copied or has changed; the save fails with the same error.
        """
        if job.waves is None:
            return
        self._serve(job, job.waves)
        self._set_copied(job)

    def abandon(self, job: SaveJob, error: BaseException) -> None:
        """Make a save fail with `error` that cannot be copied to its end; does nothing without waves."""
        if job.waves is not None and not job.staging.done():
            job.future.asked = True
            job.waves.abort(error)
            job.staging.set_exception(error)

    def _serve(self, job: SaveJob, waves: WaveSource) -> None:
        begun = time.monotonic()
        waves.serve(job.future.done, self._seconds)
        job.waited_seconds = time.monotonic() - begun

    def _copy(self, job: SaveJob, values: dict[str, Any]) -> None:
        """Copy the state for the backend; keeps DTensors and containers if a custom planner will read the copy."""
        if job.planner is None or type(job.planner) is DefaultSavePlanner:
            # Values are compared in the saver's process, which has no memory for all of them.
            self._copy_for_worker(job, values, in_waves=not getattr(job.planner, "compare_all", False))
            return
        job.staged_state, arena = self._stager.stage_as_it_is(values)
        job.done.append(lambda: self._stager.pool.give_back(arena))

    def plan_and_copy(self, job: SaveJob) -> None:
        """Run a custom planner's local planning, and copy the data of the save into memory that the worker shares.

        Needed for a custom stager or a custom planner when saves run in a worker process.
        """
        values, job.staged_state = job.staged_state or {}, None
        if job.planner is not None and type(job.planner) is not DefaultSavePlanner:
            coordinates = job.link.seat.rank == 0
            job.planned, values = plan_here(job.planner, values, is_coordinator=coordinates)
        self._copy_for_worker(job, values)

    def _copy_later(self, job: SaveJob, values: dict[str, Any]) -> AsyncSaveResponse:
        if self._entry.locked_here:  # values may change as soon as this returns
            self._copy(job, values)
            self._end_copy(job)
            return AsyncSaveResponse(job.staging, job.future)
        if self._stager.budget is not None:  # the thread could not wait for the earlier saves: this one is queued
            self._free_memory()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dcp-stager")
        copied = self._entry.copy_later()

        def copy() -> None:
            failed = None
            try:
                self._copy(job, values)
                if job.staged is not None and job.staged.waves is not None:
                    job.copied.set_result(None)
                    self._serve(job, job.staged.waves)
            except BaseException as error:  # noqa: BLE001 - both futures hold it
                failed = error
            copied()  # before threads that wait for the lock are notified
            if failed is None:
                self._set_copied(job)
            else:
                job.staging.set_exception(failed)

        try:
            self._thread.submit(on_this_stream(copy))
        except BaseException:
            copied()
            raise
        return AsyncSaveResponse(job.staging, job.future)

    def _late_copy(self, job: SaveJob) -> SaverDeadlineError:
        return SaverDeadlineError(
            f"the copy for the save to {job.checkpoint_id!s} was not complete after {self._seconds:g} s (save_seconds)"
            ": the stager has not finished"
        )

    def await_copy(self, job: SaveJob) -> None:
        """Wait until the copy of a save is complete, except for what is copied in waves.

        Raises:
            SaverDeadlineError: The copy was not complete in time.
            Exception: Staging failed.
        """
        if wait([job.copied], self._seconds).not_done:
            raise self._late_copy(job)
        job.copied.result()

    def await_waves(self, job: SaveJob) -> None:
        """Wait until the trainer has heard of the end of a save, for which it may still be copying."""
        wait([job.staging], self._seconds)

    def end(self) -> None:
        """End the threads of staging; each copy's memory is released once the copy is not in use any more."""
        self._stager.copier.close()
        self._stager.pool.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False)


def _values(state_dict: dict[str, Any], link: GroupLink) -> dict[str, Any]:
    """Replace wrappers such as `PerRank` by this rank's values."""
    ranked: dict[str, Any] = with_rank_values(with_states(state_dict), link.seat.rank)
    return ranked


def _stager_of(writer: StorageWriter | None) -> AsyncStager | None:
    """Return the storage writer if it is also a stager, as in stock; None if it only makes a plain copy."""
    return writer if isinstance(writer, AsyncStager) and not is_plain_blocking(writer) else None


def _take_staged(job: SaveJob, done: Future[dict[str, Any]]) -> None:
    try:
        job.staged_state = done.result()
    except BaseException as error:  # noqa: BLE001 - cancelling, too: both futures hold it
        job.staging.set_exception(error)
    else:
        job.staging.set_result(None)
