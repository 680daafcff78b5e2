"""`AsyncSaver`: copies state dicts and saves the copies in the background, one at a time."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dcp_async.errors import SaverClosedError, SaverDeadlineError
from dcp_async.options import AsyncCheckpointerType, Overlap, SaverOptions, check_overlap, saver_name
from dcp_async.queue.job_staging import JobStager
from dcp_async.queue.jobs import AsyncSaveResponse, SaveFuture, SaveJob, Surroundings
from dcp_async.queue.save_agreement import GroupLink, LinkTable
from dcp_async.queue.save_queue import Entry, SaveQueue, check_policy
from dcp_async.savers.backend import Backend, BackendRun
from dcp_async.staging.arenas import ArenaPool
from dcp_async.staging.checks import MutationGuard
from dcp_async.staging.copy_state import Copier, Stager
from dcp_async.staging.placement import Budget
from dcp_core import (
    AsyncStager,
    DcpError,
    Metadata,
    SavePlanner,
    StorageWriter,
)
from dcp_core.arguments import absolute_id_for, adopted
from dcp_core.calls import outside_compile, without_positional_path
from dcp_core.records.protocols import CheckpointId

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncSaver:
    """Saver that copies state dicts and saves the copies in the background; a context manager.

    Saves run one at a time, in the order in which they were started. One saver may serve several process groups, models
    and checkpoint ids. Ranks that are in several groups must start their saves in the same order.

    Args:
        kind: `AsyncCheckpointerType.PROCESS`, `AsyncCheckpointerType.THREAD`, or its value.
        overlap: Policy for a new save while an earlier one runs: `wait`, `skip` or `latest`; see `async_save`.
        options: None for the defaults.

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
        self._backend = _make_backend(name, self.options)
        self._links = LinkTable(self.options)
        self._pool = ArenaPool(
            shared=self._backend.shares_memory,
            pinned=self.options.pin_memory,
            max_bytes=self.options.max_staging_bytes,
        )
        guard = MutationGuard() if self.options.mutation_guard else None
        stager = Stager(self._pool, Copier(self.options.copy_threads), guard, Budget.of(self.options))
        self._seconds = min(self.options.save_timeout_seconds, threading.TIMEOUT_MAX)
        self._entry = Entry()
        run = BackendRun(self._backend)
        # The queue and the backend do not reference this object, so a dropped saver is freed immediately.
        self._queue = SaveQueue(run, f"dcp-{name}-saver", self.options.save_timeout_seconds)
        run.copies = self._copies = JobStager(stager, self._entry, self._seconds, self._queue.wait_turn)
        self.bytes_to_stage = self._copies.bytes_to_stage
        """Function that returns the size in bytes of a state dict's copy on this rank."""
        self.bytes_to_wait_for = self._copies.bytes_to_wait_for
        """Function that returns how many of these bytes are stored before `save` returns; 0 without waves."""
        self._owner = os.getpid()
        self._warning = weakref.finalize(self, _warn_dropped, name, self._owner)
        self._warning.atexit = False

    @property
    def closed(self) -> bool:
        """Whether `save` raises: the saver is closed, or belongs to the parent process of a fork."""
        return self._queue.closed or self._owner != os.getpid()

    @property
    def staging_bytes(self) -> int:
        """Memory for staged copies in bytes, including memory kept for the next copy."""
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
        """Start the worker process and return when it is ready, so that the first save is as fast as later ones.

        Args:
            process_group: As for `save`.
            state_dict: State dict like those to be saved, to allocate memory and send its structure to the worker.
            checkpoint_id: Checkpoint id of a later save, for a storage that lends memory for the copy.
            no_dist: As for `save`.

        Raises:
            WorkerError: The worker process cannot be started.
            SaverClosedError: The saver is closed.
            Exception: `state_dict` cannot be staged.

        Ranks: every rank of the group; waits only for this rank's own earlier saves.
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
            storage_writer: Storage writer to use instead of the one that `checkpoint_id` selects; a process saver uses
                a copy.
            planner: Save planner. A process saver runs a copy of a `DefaultSavePlanner` in the worker; of all other
                planners, subclasses included, the methods that access tensors run in this process.
            process_group: Process group of the ranks that save together; None for all ranks.
            async_stager: Stager that copies the state dict; None for the storage writer if it is a stager, else for the
                saver's stager. If `stage` returns a future, `save` may return before the copy is complete.
            no_dist: Whether to save from this process alone.
            use_collectives: Whether ranks plan together; with False, every rank plans alone.
            overlap: Overlap policy of this save; None for the saver's.

        Returns:
            Future of the checkpoint's metadata, done when the checkpoint is published; with a stager that returns
            futures, an `AsyncSaveResponse`, which has a second future for the copy.

        Raises:
            Exception: The copy failed (the other ranks' futures raise the same error), or an earlier save failed and
                its future was never read.
            SaverClosedError: The saver is closed.
            SaverDeadlineError: An earlier save of this rank, or a thread in `lock`, exceeds `save_timeout_seconds`.
            OperationError: This thread is already starting a save (for example in the `state_dict()` of an object), or
                another rank uses another `overlap` policy.

        Ranks: every rank of the group; waits only for this rank's own earlier saves, if the policy is `wait`.
        """
        policy = self._overlap if overlap is None else overlap
        check_overlap(policy)
        self._check_open()
        surroundings = Surroundings.now()
        link = self._links.of(process_group, no_dist=no_dist)
        try:
            storage_writer, planner = adopted(storage_writer, StorageWriter), adopted(planner, SavePlanner)
            place = None if checkpoint_id is None else absolute_id_for(storage_writer, checkpoint_id)
            self._enter(checkpoint_id, wait=policy == "wait" or not link.agrees)
        except Exception as error:  # the other ranks begin this save
            link.withdraw(link.draw(), error)
            raise
        try:
            self._prepare_backend(link)
            job = SaveJob(link, link.take_number(policy), place, storage_writer, planner, use_collectives)
            job.surroundings, job.group_store = surroundings, link.group_store()
            job.may_be_superseded = policy == "latest" and link.agrees
            return self._start(job, policy, state_dict, async_stager)
        finally:
            self._entry.leave()

    def _prepare_backend(self, link: GroupLink) -> None:
        try:
            with _naming_the_end():
                self._backend.before_save()
        except Exception as error:  # the other ranks begin this save
            link.withdraw(link.draw(), error)
            raise

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Let this thread change tensors: wait until no copy is in progress, and delay saves of other threads.

        Only needed with a stager that returns futures. A `save` inside the block returns when its copy is complete.
        """
        self._check_here()
        with self._entry.lock():
            yield

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until every save has ended, successfully or not.

        Raises SaverDeadlineError after `timeout_seconds` (None: `SaverOptions.save_timeout_seconds`).
        """
        self._check_here()
        self._queue.drain(self.options.save_timeout_seconds if timeout_seconds is None else timeout_seconds)

    def close(self, timeout_seconds: float | None = None) -> None:
        """Wait for all saves, end the thread or worker process, and raise errors of saves with unread futures.

        In a forked child process, `close` does nothing.

        Args:
            timeout_seconds: Longest time to wait; None for `SaverOptions.close_timeout_seconds`.

        Raises:
            SaverDeadlineError: A save has not ended within `timeout_seconds`; the saves are then ended as by `end`.
            Exception: An earlier save failed, and its future was never read; further errors are logged.
        """
        if self._owner != os.getpid():
            return
        self._queue.close()
        try:
            self._queue.drain(self.options.close_timeout_seconds if timeout_seconds is None else timeout_seconds)
        finally:
            self.end()
        error = self._queue.next_unasked()
        self.log_unasked()
        if error is not None:
            raise error

    def log_unasked(self) -> None:
        """Log all errors of failed saves with unread futures, and mark them as read."""
        self._queue.log_unasked()

    def end(self) -> None:
        """Close the saver without waiting for its saves, and end the worker process.

        The future of a queued save raises SaverClosedError. A save in the worker is not published. A save in a thread
        continues, and the interpreter waits for it before exiting.
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
        with contextlib.suppress(Exception):  # the error that is being raised matters more
            self.close()

    def _enter(self, place: CheckpointId | None, *, wait: bool) -> None:
        while True:
            if wait:
                self._queue.wait_turn()
            if not self._entry.enter(self._seconds):
                raise SaverDeadlineError(
                    f"the save to {place!s} could not begin within {self._seconds:g} s (save_timeout_seconds): another "
                    "thread is in `lock`, or is starting a save"
                )
            if not (wait and self._queue.busy):  # another thread may have been first
                return
            self._entry.leave()

    def _start(
        self, job: SaveJob, policy: Overlap, state_dict: dict[str, Any], stager: AsyncStager | None
    ) -> SaveFuture | AsyncSaveResponse:
        try:
            check_policy(job, policy)
            self._queue.raise_unasked()
            if not self._queue.admit(job, policy):
                return job.future
            self._queue.raise_unasked()
            with _naming_the_end():
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


def _make_backend(name: str, options: SaverOptions) -> Backend:
    if name == "thread":
        from dcp_async.savers.backend import ThreadBackend  # noqa: PLC0415 - only one backend is needed

        return ThreadBackend(options)
    if name == "process":
        from dcp_async.savers.process_saver import ProcessBackend  # noqa: PLC0415

        return ProcessBackend(options)
    raise ValueError(f"{name!r} is not a kind of saver: pass 'process' or 'thread'")


@contextlib.contextmanager
def _naming_the_end() -> Iterator[None]:
    """Raise SaverClosedError if no thread can be started because the interpreter exits."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DcpError) or threading.main_thread().is_alive():
            raise
        raise SaverClosedError(
            f"the interpreter is ending ({error}), so that no save can begin in the background any more: save with "
            "`save`, or before the program's end"
        ) from error


def _warn_dropped(name: str, owner: int) -> None:
    if os.getpid() == owner:
        warnings.warn(
            f"a {name} saver was dropped without close(): its resources are released once its saves have ended, but "
            "nothing waits for them, and failures are only logged. Use it as a context manager, or close it",
            ResourceWarning,
            stacklevel=3,  # the caller of the finalizer
        )


_savers: dict[str, AsyncSaver] = {}
_lock = threading.Lock()


@without_positional_path
def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overlap: Overlap = "wait",
) -> Future[Metadata] | AsyncSaveResponse:
    """Copy a state dict and save the copy in the background, through this process's shared saver.

    For other options, or several savers, use `AsyncSaver`. The interpreter completes running saves before it exits.

    Args:
        state_dict: State dict; without `async_stager`, its tensors may be changed as soon as `async_save` returns.
        checkpoint_id: Path or URI of the checkpoint.
        storage_writer: Storage writer to use instead of the one that `checkpoint_id` selects.
        planner: Save planner; see `AsyncSaver.save`.
        process_group: Process group of the ranks that save together; None for all ranks.
        async_checkpointer_type: Whether the save runs in a thread or in a worker process.
        async_stager: Stager that copies the state dict; see `AsyncSaver.save`.
        no_dist: Whether to save from this process alone.
        use_collectives: Whether ranks plan together; with False, every rank plans alone.
        overlap: Policy while an earlier save runs: `wait` for the earlier save, `skip` this save, or let it replace a
            queued save (`latest`). The future of a skipped or replaced save raises.

    Returns:
        Future of the checkpoint's metadata, or an `AsyncSaveResponse`; see `AsyncSaver.save`, also for errors.

    Ranks: every rank of the group; waits only for this rank's own earlier saves, if the policy is `wait`.

    Example:
        ```python
        import torch
        from dcp_async import async_save

        weights = torch.ones(1000)
        future = async_save({"weights": weights}, checkpoint_id="step-1")
        weights.zero_()  # training goes on; the saved values are the ones
        future.result()  # raises if the save failed
        ```
    """
    return shared_saver(async_checkpointer_type).save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        async_stager=async_stager,
        no_dist=no_dist,
        use_collectives=use_collectives,
        overlap=overlap,
    )


def shared_saver(
    kind: AsyncCheckpointerType | str = AsyncCheckpointerType.PROCESS, options: SaverOptions | None = None
) -> AsyncSaver:
    """Return the `AsyncSaver` that `async_save` uses, for its methods `warm_up`, `lock`, `wait` and `close`.

    Raises ValueError if it already exists with other options.
    """
    name = saver_name(kind)
    with _lock:
        saver = _savers.get(name)
        if saver is None or saver.closed:
            saver = _savers[name] = AsyncSaver(kind, options=options)
        elif options is not None and options != saver.options:
            raise ValueError(f"the {name} saver is in use with other options; call close_savers() first")
        return saver


def close_savers() -> None:
    """Close all shared savers, as `AsyncSaver.close` does. The next `async_save` creates a new one."""
    with _lock:
        savers = [*_savers.values()]
        _savers.clear()
    for saver in savers:
        saver.close()


def _at_exit() -> None:
    """Close shared savers, whose threads Python has joined; log unread errors."""
    for saver in _savers.values():
        saver.log_unasked()
        saver.end()


def _forget_in_child() -> None:
    global _lock  # noqa: PLW0603 - there is one for the process
    _lock = threading.Lock()
    for saver in _savers.values():
        saver.end()
    _savers.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forget_in_child)
