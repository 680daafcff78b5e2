"""Staging of one asynchronous save."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from dcp_async.errors import SaverDeadlineError
from dcp_async.queue.jobs import AsyncSaveResponse, SaveFuture, SaveJob
from dcp_async.queue.portable import plan_here
from dcp_async.queue.save_agreement import GroupLink
from dcp_async.queue.save_queue import Entry
from dcp_async.staging.copy_state import Staged, Stager
from dcp_async.staging.stagers import DefaultStager, is_plain_blocking
from dcp_async.staging.waves import WaveSource
from dcp_base.hookspecs import CheckpointEvent
from dcp_base.schemes import scheme_of
from dcp_core import AsyncStager, DcpError, DefaultSavePlanner, StorageWriter, plugins
from dcp_core.records.protocols import CheckpointId, with_states
from dcp_core.state_dict.per_rank import with_rank_values
from dcp_core.tensors.devices import on_this_stream
from dcp_io import MemoryLender, open_store
from dcp_io.lent_memory import lender_of


class JobStager:
    """Copier of one saver's state dicts; the caller of `stage` holds `entry`.

    `seconds` limits `await_copy` and `finish`. `free_memory` waits for earlier saves; it is held weakly, because its
    queue references this object.
    """

    def __init__(self, stager: Stager, entry: Entry, seconds: float, free_memory: Callable[[], object]) -> None:
        self._stager = stager
        self._entry = entry
        self._seconds = seconds
        self._wait_for_saves = weakref.WeakMethod(free_memory)
        self._thread: ThreadPoolExecutor | None = None

    def stage_now(self, state_dict: dict[str, Any], link: GroupLink, checkpoint_id: CheckpointId | None) -> Staged:
        """Stage for a warm-up; the caller passes the copy to `give_back`."""
        values, lender = _values(state_dict, link), lender_for(checkpoint_id)
        return self._stager.stage(values, in_waves=True, free_memory=self._free_memory, lender=lender)

    def bytes_to_stage(self, state_dict: dict[str, Any]) -> int:
        """See `AsyncSaver.bytes_to_stage`."""
        return self._stager.measure(with_states(state_dict))[0]

    def bytes_to_wait_for(self, state_dict: dict[str, Any]) -> int:
        """See `AsyncSaver.bytes_to_wait_for`."""
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
        """Stage a save, in a thread if the stager is asynchronous."""
        job.copy_begun = time.monotonic()
        try:
            return self._begin_copy(job, state_dict, stager)
        except BaseException as error:
            job.staging.set_exception(error)
            raise

    def _begin_copy(
        self, job: SaveJob, state_dict: dict[str, Any], stager: AsyncStager | None
    ) -> SaveFuture | AsyncSaveResponse:
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
        job.waves = None if job.staged is None else job.staged.waves
        if job.waves is None:
            self._set_copied(job)
        else:
            job.copied.set_result(None)

    def _set_copied(self, job: SaveJob) -> None:
        job.staging.set_result(None)
        if self._stager.budget is not None:
            _report_copy(job)

    def finish(self, job: SaveJob) -> None:
        """Copy the rest in waves, while the queued save writes it; return normally if the save itself fails.

        If a tensor cannot be copied or has changed, or the storage is late (SaverDeadlineError), the save fails with
        the raised error.
        """
        if job.waves is None:
            return
        self._serve(job, job.waves)
        self._set_copied(job)

    def abandon(self, job: SaveJob, error: BaseException) -> None:
        """Make a save fail whose waves cannot be completed."""
        if job.waves is not None and not job.staging.done():
            job.future.asked = True
            job.waves.abort(error)
            job.staging.set_exception(error)

    def _serve(self, job: SaveJob, waves: WaveSource) -> None:
        begun = time.monotonic()
        waves.serve(job.future.done, self._seconds)
        job.waited_seconds = time.monotonic() - begun

    def _copy(self, job: SaveJob, values: dict[str, Any]) -> None:
        if job.planner is None or type(job.planner) is DefaultSavePlanner:
            # With `compare_all`, the saver's process reads all values, so they must all be in memory.
            self._copy_for_worker(job, values, in_waves=not getattr(job.planner, "compare_all", False))
            return
        job.staged_state, arena = self._stager.stage_as_it_is(values)
        job.done.append(lambda: self._stager.pool.give_back(arena))

    def plan_and_copy(self, job: SaveJob) -> None:
        """Run a custom planner's local planning; copy its data for the worker."""
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
        if self._stager.budget is not None:  # the thread cannot wait for earlier saves once this one is queued
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
            f"the copy for the save to {job.checkpoint_id!s} was not complete after {self._seconds:g} s "
            "(save_timeout_seconds): the stager has not finished"
        )

    def await_copy(self, job: SaveJob) -> None:
        """Wait for a copy without its waves. Raises SaverDeadlineError."""
        if wait([job.copied], self._seconds).not_done:
            raise self._late_copy(job)
        job.copied.result()

    def await_waves(self, job: SaveJob) -> None:
        """Wait until the trainer no longer copies in waves."""
        wait([job.staging], self._seconds)

    def end(self) -> None:
        """End the threads."""
        self._stager.copier.close()
        self._stager.pool.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False)


def _values(state_dict: dict[str, Any], link: GroupLink) -> dict[str, Any]:
    ranked: dict[str, Any] = with_rank_values(with_states(state_dict), link.seat.rank)
    return ranked


def _stager_of(writer: StorageWriter | None) -> AsyncStager | None:
    return writer if isinstance(writer, AsyncStager) and not is_plain_blocking(writer) else None


def _take_staged(job: SaveJob, done: Future[dict[str, Any]]) -> None:
    try:
        job.staged_state = done.result()
    except BaseException as error:  # noqa: BLE001 - cancelling, too: both futures hold it
        job.staging.set_exception(error)
    else:
        job.staging.set_result(None)


def _report_copy(job: SaveJob) -> None:
    if job.staged is None:
        return
    seat, seconds = job.link.seat, time.monotonic() - job.copy_begun
    event = CheckpointEvent(
        "save",
        "stage",
        "finished",
        seat.rank,
        None if job.checkpoint_id is None else os.fspath(job.checkpoint_id),
        seconds=seconds,
        own_seconds=seconds - job.waited_seconds,
        bytes=job.staged.structure.nbytes,
        memory_bytes=job.staged.arena.nbytes,
        world_size=seat.world_size,
        time=time.time(),
    )
    plugins.emit(event)


def lender_for(checkpoint_id: CheckpointId | None, storage_writer: StorageWriter | None = None) -> MemoryLender | None:
    """Return the lender of a save's storage, if any."""
    try:
        if storage_writer is not None:
            return storage_writer.lender()
        if checkpoint_id is None or scheme_of(checkpoint_id) == "file":
            return None
        return lender_of(open_store(checkpoint_id))
    except (DcpError, OSError, ValueError):
        return None
