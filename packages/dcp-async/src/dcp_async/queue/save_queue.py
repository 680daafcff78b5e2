"""Queue of saves with overlap policies."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures

from dcp_async.errors import SaverClosedError, SaverDeadlineError
from dcp_async.options import Overlap
from dcp_async.queue.jobs import SaveJob
from dcp_base.logs import library_logger
from dcp_core import CoordinatorLostError, Metadata, OperationError
from dcp_core.errors import SaveSkippedError
from dcp_core.events import LOGGER_NAME

_logger = library_logger(LOGGER_NAME)

GO, SKIP, SUPERSEDED = "go", "skip", "superseded"


class SaveQueue:
    """Queue of one process's saves, which a thread runs one at a time; `save_timeout_seconds` limits each wait."""

    def __init__(self, run: Callable[[SaveJob], Metadata], name: str, save_timeout_seconds: float) -> None:
        self._run = run
        self._save_timeout_seconds = min(save_timeout_seconds, threading.TIMEOUT_MAX)
        # The interpreter runs queued work and joins the thread before it exits.
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix=name)
        self._changed = threading.Condition()
        self._running: SaveJob | None = None
        self._waiting: SaveJob | None = None
        self._failed: list[SaveJob] = []
        self._closed = False
        weakref.finalize(self, _log_at_end, self._failed, os.getpid())

    @property
    def busy(self) -> bool:
        """Whether a save is running or queued."""
        return self._running is not None or self._waiting is not None

    @property
    def closed(self) -> bool:
        """Whether the queue accepts no more saves."""
        return self._closed

    def check_open(self) -> None:
        """Raise SaverClosedError if it is closed."""
        if self._closed:
            raise SaverClosedError("the saver is closed: make another one, or close it after the last save")

    def raise_unasked(self) -> None:
        """Raise the next unread error, if any."""
        error = self.next_unasked()
        if error is not None:
            raise error

    def next_unasked(self) -> BaseException | None:
        """Return the next unread error, marked as read."""
        return _next_unasked(self._failed)

    def log_unasked(self) -> None:
        """Log all unread errors, and mark them as read."""
        _log_unasked(self._failed)

    def admit(self, job: SaveJob, overlap: Overlap) -> bool:
        """Return whether a save may be staged now; False if the policy skips it. The same on all ranks.

        `wait` first waits for earlier saves, as `wait_turn` does; `latest` cancels a queued save.
        """
        if overlap == "wait" or not job.link.agrees:
            self.wait_turn()
            return True
        if overlap == "skip":
            return self._admit_unless_busy(job)
        self._supersede()
        return True

    def wait_turn(self) -> None:
        """Wait until all saves have ended. Raises SaverDeadlineError if one takes `save_timeout_seconds`."""
        self._wait_turn(lambda: not self.busy)

    def put(self, job: SaveJob) -> None:
        """Queue a save. Raises SaverClosedError."""
        with self._changed:
            self.check_open()
            self._waiting = job
        try:  # without the lock, so that the thread can begin at once
            self._thread.submit(self._take, job)
        except BaseException:  # closed meanwhile, or the interpreter ends
            with self._changed:
                if self._waiting is job:
                    self._waiting = None
                self._changed.notify_all()
            self.check_open()
            raise

    def drain(self, timeout_seconds: float) -> None:
        """Wait until all saves have ended. Raises SaverDeadlineError after `timeout_seconds`."""
        if not self._wait(lambda: not self.busy, timeout_seconds):
            running = self._running or self._waiting
            where = "" if running is None else f" to {running.checkpoint_id!s}"
            raise SaverDeadlineError(
                f"the save{where} was still running after {timeout_seconds:g} s; the checkpoint does not exist yet. "
                "Allow more time with close_timeout_seconds, or look for what holds the storage up"
            )

    def close(self) -> None:
        """Accept no more saves, without waiting."""
        with self._changed:
            self._closed = True
        self._thread.shutdown(wait=False)

    def drop(self) -> None:
        """Cancel the queued save after `close`: its future raises on all ranks."""
        with self._changed:
            job, self._waiting = self._waiting, None
            self._changed.notify_all()
        if job is not None:
            error = SaverClosedError(f"the save to {job.checkpoint_id!s} was left out: its saver was closed before")
            self._leave_out(job, error)
            with contextlib.suppress(CoordinatorLostError):  # the other ranks notice the lost store themselves
                job.link.withdraw(job.ticket, error)

    def _admit_unless_busy(self, job: SaveJob) -> bool:
        with self._changed:
            fate = job.link.decide(job.ticket, SKIP if self.busy else GO)
        if fate == GO:  # the earlier save has ended on another rank, so it ends here soon
            self.wait_turn()
            return True
        self._leave_out(job, SaveSkippedError(f"the save to {job.checkpoint_id!s} was skipped: {self._what_runs()}"))
        return False

    def _supersede(self) -> None:
        with self._changed:
            waiting = self._waiting
        if waiting is None:
            return
        if waiting.may_be_superseded and futures.wait([waiting.staging], self._save_timeout_seconds).not_done:
            raise _overdue("the copy for the save", waiting, self._save_timeout_seconds)
        with self._changed:
            if (
                waiting is self._waiting
                and waiting.may_be_superseded  # other ranks would not see this decision
                and waiting.link.decide(waiting.ticket, SUPERSEDED) == SUPERSEDED
            ):
                self._waiting = None
                self._leave_out(waiting, _superseded(waiting))
        self._wait_turn(lambda: self._waiting is None)

    def _leave_out(self, job: SaveJob, error: Exception) -> None:
        job.future.asked = True
        job.future.set_exception(error)
        job.release()

    def _what_runs(self) -> str:
        running = self._running or self._waiting
        return "an earlier one is running" if running is None else f"the one to {running.checkpoint_id!s} is running"

    def _wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(ready, seconds)

    def _wait_turn(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            while not ready():
                before = self._running or self._waiting
                if not self._changed.wait_for(
                    lambda before=before: ready() or (self._running or self._waiting) is not before,  # type: ignore[misc]
                    self._save_timeout_seconds,
                ):
                    raise _overdue("the save", before, self._save_timeout_seconds)

    def _take(self, job: SaveJob) -> None:
        try:
            if not self._begin(job):
                return
            result, error = self._run(job), None
        except BaseException as raised:  # noqa: BLE001 - the save's future raises it
            result, error = None, raised
        job.release()
        with self._changed:
            self._running = None
            if self._waiting is job:  # it could not begin
                self._waiting = None
            if error is not None:
                self._failed.append(job)
            self._changed.notify_all()
        if error is not None:
            job.future.set_exception(error)
        elif result is not None:
            job.future.set_result(result)

    def _begin(self, job: SaveJob) -> bool:
        with self._changed:
            if self._waiting is not job:
                return False
            if job.may_be_superseded and job.link.decide(job.ticket, GO) != GO:
                self._waiting = None
                self._leave_out(job, _superseded(job))
                self._changed.notify_all()
                return False
            self._waiting, self._running = None, job
            self._changed.notify_all()
        return True


def _next_unasked(failed: list[SaveJob]) -> BaseException | None:
    while failed:
        try:
            job = failed.pop(0)
        except IndexError:  # another thread was first
            break
        error = job.future.failure()
        if error is not None and not job.future.asked:
            job.future.asked = True
            return error
    return None


def _log_at_end(failed: list[SaveJob], owner: int) -> None:
    if os.getpid() == owner:
        _log_unasked(failed)


def _log_unasked(failed: list[SaveJob]) -> None:
    while (error := _next_unasked(failed)) is not None:
        _logger.error("a save in the background failed, and its future was never read", exc_info=error)


def _overdue(what: str, job: SaveJob | None, seconds: float) -> SaverDeadlineError:
    where = "" if job is None else f" to {job.checkpoint_id!s}"
    return SaverDeadlineError(
        f"{what}{where} was not done after {seconds:g} s (save_timeout_seconds), and this one must wait for it. Allow "
        "more time, or look for what holds it up"
    )


def _superseded(job: SaveJob) -> SaveSkippedError:
    return SaveSkippedError(f"the save to {job.checkpoint_id!s} was left out: a later one came before it could begin")


def check_policy(job: SaveJob, policy: Overlap) -> None:
    """Raise OperationError if ranks have different policies."""
    other = job.ticket.overlap
    if other and other != policy:
        raise OperationError(
            f"rank {job.link.seat.rank}, save to {job.checkpoint_id!s}: overlap is {policy!r} here and {other!r} on "
            "another rank; it must be the same on all ranks"
        )


class Entry:
    """Lock of a saver: a save starts or copies tensors, or a thread changes tensors inside `lock`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entered_by: int | None = None
        self._copies = 0
        self._locked_by: int | None = None
        self._depth = 0

    @property
    def locked_here(self) -> bool:
        """Whether this thread is inside `lock`."""
        return self._locked_by == threading.get_ident()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other threads from starting saves and copying; reentrant."""
        here = threading.get_ident()
        with self._changed:
            # The caller's `state_dict()` may change values while this thread starts a save.
            self._changed.wait_for(lambda: self._may_lock(here))
            self._locked_by = here
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._locked_by = None
                    self._changed.notify_all()

    def enter(self, seconds: float) -> bool:
        """Return whether this thread may start a save, after at most `seconds`.

        Raises OperationError if this thread is already starting one.
        """
        here = threading.get_ident()
        with self._changed:
            if self._entered_by == here:
                raise OperationError(
                    "a save was started while this thread was starting one (in a state_dict(), a stager or a signal's "
                    "handler): let the first call return before the next one"
                )
            free = self._changed.wait_for(lambda: self._may_enter(here), seconds)
            if free:
                self._entered_by = here
            return free

    def leave(self) -> None:
        """Release the lock after the start of a save."""
        with self._changed:
            self._entered_by = None
            self._changed.notify_all()

    def copy_later(self) -> Callable[[], None]:
        """Keep threads out of `lock` until the returned function is called."""
        with self._changed:
            self._copies += 1
        return self._end_copy

    def _end_copy(self) -> None:
        with self._changed:
            self._copies -= 1
            self._changed.notify_all()

    def _may_lock(self, here: int) -> bool:
        if self._locked_by is not None:
            return self._locked_by == here
        return not self._copies and self._entered_by in {None, here}

    def _may_enter(self, here: int) -> bool:
        return self._entered_by is None and self._locked_by in {None, here}
