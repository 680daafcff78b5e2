"""The process saver: a worker process saves from memory that it shares with the trainer.

Structures are sent once; later saves send an identifier, and the objects that have changed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dcp_async.errors import SaverClosedError, SaverDeadlineError, WorkerError, WorkerLostError
from dcp_async.options import SaverOptions
from dcp_async.queue.jobs import SaveJob, Surroundings
from dcp_async.queue.portable import pickled, portable
from dcp_async.queue.save_agreement import GroupLink, Seat
from dcp_async.savers.worker_handle import WorkerProcess
from dcp_async.savers.worker_messages import (
    Failed,
    Forget,
    ForgetArena,
    NewArena,
    NewGroup,
    NewStructure,
    NewWaves,
    Save,
    Saved,
)
from dcp_async.staging.arenas import Arena
from dcp_async.staging.copy_state import Staged
from dcp_base.hookspecs import CheckpointEvent
from dcp_core import CoordinatorLostError, Metadata, SavePlanner, plugins
from dcp_core.arguments import resolve_storage
from dcp_core.events import note_rate
from dcp_core.planning.replicas import same_value
from dcp_core.records.metadata import DeferredMetadata
from dcp_io.recently_used import RecentlyUsed
from dcp_ranks.phases.phases import Failure

_KEPT_STRUCTURES = 16


@dataclass(slots=True)
class _Sent:
    objects: list[Any] = field(default_factory=list)
    means: bytes = b""


@dataclass(slots=True)
class _Known:
    """What one worker has received; later messages contain only changes."""

    arenas: dict[Arena, tuple[int, int]] = field(default_factory=dict)
    """Number and size of each mapped arena."""
    drawn: int = 0
    surroundings: Surroundings = field(default_factory=Surroundings)
    groups: dict[str, Seat] = field(default_factory=dict)
    structures: RecentlyUsed[str, _Sent] = field(default_factory=lambda: RecentlyUsed(_KEPT_STRUCTURES))


class ProcessBackend:
    """Backend with a worker process, which starts on first use and is replaced after its end."""

    shares_memory = True

    def __init__(self, options: SaverOptions) -> None:
        self._options = options
        self._worker: WorkerProcess | None = None
        self._known = _Known()
        self._links: dict[str, GroupLink] = {}
        self._saves = 0
        self._phases = _ReportedPhases()
        self._closed = False
        self._start_lock = threading.Lock()
        self._owner = os.getpid()

    @property
    def worker(self) -> WorkerProcess | None:
        """Handle of the worker, if started."""
        return self._worker

    def warm_up(self, link: GroupLink, staged: Staged | None) -> None:
        """Start the worker, and send settings and structure."""
        seat = link.for_worker()
        worker = self._running(link)
        self._send_group(worker, seat)
        if staged is not None:
            self._send_structure(worker, staged)
            self._send_arena(worker, staged.arena)

    def before_save(self) -> None:
        """Start the first worker without waiting, or tell the other ranks that one has ended."""
        worker = self._worker
        if worker is not None:
            worker.settle()
        elif not self._closed:
            with contextlib.suppress(OSError, SaverClosedError):  # `run` tries again, and raises
                self._started()

    def run(self, job: SaveJob) -> Metadata:
        """See `Backend.run`.

        Raises:
            WorkerError: The worker cannot be started, or the storage writer or planner cannot be sent.
            WorkerLostError: The worker ended during the save.
            SaverDeadlineError: The save took longer than `save_timeout_seconds`.
        """
        self._phases.begin()
        try:
            means, writer = _means(job), _pickled_writer(job)
            seat = job.link.for_worker()
            worker = self._running(job.link)
            self._send_group(worker, seat)
            request = self._request(worker, job, seat, means)
            self._send_waves(worker, job)
            self._send(worker, request, job)
            self._known.surroundings = job.surroundings
        except BaseException as error:
            self._give_up(job, error)
            job.link.withdraw(job.ticket, error)
            raise
        finally:
            if job.staged is not None and job.staged.waves is not None:
                job.staged.waves.saver_end.close()  # the worker has its own copy, unless sending failed
        try:
            answer = self._answer(worker, request, job)
        except BaseException as error:
            self._give_up(job, error)
            raise
        return _metadata(job, answer, writer)

    def close(self) -> None:
        """End the worker for good. May be called during `run`, which then raises."""
        with self._start_lock:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None and self._owner == os.getpid():
            worker.close()

    def _send(self, worker: WorkerProcess, request: Save, job: SaveJob) -> None:
        try:
            worker.send(request)
        except WorkerLostError as error:
            raise _naming(job, error) from error

    def _send_waves(self, worker: WorkerProcess, job: SaveJob) -> None:
        waves = None if job.staged is None else job.staged.waves
        if waves is not None:
            worker.send(NewWaves(waves.piece_bytes, waves.digests), waves.saver_end.fileno())

    def _answer(self, worker: WorkerProcess, request: Save, job: SaveJob) -> Saved:
        try:
            deadline = time.monotonic() + self._options.save_timeout_seconds
            answer = worker.read(deadline, meanwhile=lambda: _report_losses(job))
        except (WorkerLostError, SaverDeadlineError) as error:
            raise _naming(job, error) from error
        if isinstance(answer, Failed) and answer.number == 0:
            # Unknown which message failed to unpickle: kill the worker; the next one gets the full state.
            worker.kill()
            refused = _raised(answer.failure)
            job.link.withdraw(job.ticket, refused)
            raise refused
        if not isinstance(answer, Saved | Failed) or answer.number != request.number:
            worker.kill()
            raise WorkerError(f"the saver's process answered another request than {request.number}; it was ended")
        if isinstance(answer, Failed):
            raise _raised(answer.failure)
        return answer

    def _running(self, link: GroupLink) -> WorkerProcess:
        self._links[link.seat.key] = link
        worker = self._started()
        worker.wait_ready()  # without the lock: `close` need not wait
        return worker

    def _started(self) -> WorkerProcess:
        with self._start_lock:
            if self._closed:
                raise SaverClosedError("the saver was closed before this save could begin")
            worker = self._worker
            if worker is not None and worker.alive:
                return worker
            if worker is not None:
                worker.close()
            environment = dict(os.environ)
            worker = WorkerProcess(self._options.worker, _weakly(self._worker_ended), environment, self._phases.pass_on)
            # Any thread may change the working directory during the start, so the worker's is unknown.
            self._known, self._worker = _Known(surroundings=Surroundings(None, environment)), worker
            return worker

    def _worker_ended(self) -> None:
        for link in list(self._links.values()):
            with contextlib.suppress(CoordinatorLostError):  # the group may have ended since
                link.worker_ended()

    def _send_group(self, worker: WorkerProcess, seat: Seat) -> None:
        if self._known.groups.get(seat.key) != seat:
            worker.send(NewGroup(seat))
            self._known.groups[seat.key] = seat

    def _request(self, worker: WorkerProcess, job: SaveJob, seat: Seat, means: bytes) -> Save:
        staged = job.staged
        if staged is None:
            raise WorkerError("nothing was staged in memory that the saver's process can read")
        sent = self._send_structure(worker, staged)
        changed = _changed(sent.objects, staged.objects)
        new_means = None if means == sent.means else means
        sent.objects, sent.means = staged.objects, means
        self._saves += 1
        return Save(
            self._saves,
            staged.structure.identifier,
            self._send_arena(worker, staged.arena),
            seat.key,
            job.ticket,
            job.checkpoint_id,
            job.use_collectives,
            changed,
            new_means,
            job.surroundings.since(self._known.surroundings),
        )

    def _give_up(self, job: SaveJob, error: BaseException) -> None:
        self._phases.fail(job, error)
        if job.staged is not None:
            sent = self._known.structures.get(job.staged.structure.identifier)
            if sent is not None:
                sent.objects, sent.means = [], b""

    def _send_arena(self, worker: WorkerProcess, arena: Arena) -> int:
        known = self._known.arenas
        for dropped in [each for each in known if each.closed]:
            worker.send(ForgetArena(known.pop(dropped)[0]))
        if arena not in known:
            known[arena] = self._known.drawn, -1
            self._known.drawn += 1
        number, nbytes = known[arena]
        if nbytes != arena.nbytes:
            worker.send(NewArena(number, arena.nbytes), arena.descriptor)
            known[arena] = number, arena.nbytes
        return number

    def _send_structure(self, worker: WorkerProcess, staged: Staged) -> _Sent:
        known, identifier = self._known.structures, staged.structure.identifier
        sent = known.get(identifier)
        if sent is None:
            sent, structure = _Sent(), staged.structure
            worker.send(NewStructure(replace(structure, skeleton=portable(structure.skeleton))))
            for evicted in known.put(identifier, sent):
                worker.send(Forget(evicted))
        return sent


def _weakly(method: Callable[[], object]) -> Callable[[], object]:
    """Wrap a method without a strong reference, so that dropping a saver ends its worker."""
    found = weakref.WeakMethod(method)

    def call() -> None:
        if (there := found()) is not None:
            there()

    return call


def _means(job: SaveJob) -> bytes:
    what = (
        "the storage writer or the planner" if job.storage_writer is not None or job.planner is not None else "the plan"
    )
    planner = job.planner.without_values() if isinstance(job.planner, SavePlanner) else job.planner
    return pickled(what, (job.storage_writer, planner, job.planned))


def _changed(before: list[Any], now: list[Any]) -> dict[int, Any]:
    if len(before) != len(now):
        return dict(enumerate(now))
    pairs = enumerate(zip(before, now, strict=True))
    return {number: new for number, (old, new) in pairs if not same_value(old, new)}


def _place(job: SaveJob) -> str:
    place = job.checkpoint_id
    if place is None and job.storage_writer is not None:
        place = job.storage_writer.checkpoint_id
    return "its storage" if place is None else os.fspath(place)


def _report_losses(job: SaveJob) -> None:
    with contextlib.suppress(CoordinatorLostError):  # the worker also notices
        job.link.report_losses(job.ticket)


def _naming(job: SaveJob, error: Exception) -> Exception:
    return type(error)(f"rank {job.link.seat.rank}, save to {_place(job)}: {error}")


def _pickled_writer(job: SaveJob) -> bytes | None:
    """Pickle the storage writer for reading metadata: the caller may reset it."""
    return None if job.storage_writer is None else pickled("the storage writer", job.storage_writer)


def _metadata(job: SaveJob, saved: Saved, pickled_writer: bytes | None) -> Metadata:
    if saved.metadata is not None:
        data = saved.metadata
        return DeferredMetadata(lambda: Metadata(**pickle.loads(data)))
    place, save_id = job.checkpoint_id, saved.save_id

    def read() -> Metadata:
        writer = None if pickled_writer is None else pickle.loads(pickled_writer)
        found: Metadata = resolve_storage(writer, place, "writer").published_metadata(save_id)
        return found

    return DeferredMetadata(read)


def _raised(failure: Failure) -> BaseException:
    error = failure.revive()
    cause = WorkerError(f"in the saver's process:\n{failure.text}")
    if error is None:
        return cause
    error.__cause__ = cause
    return error


class _ReportedPhases:
    """Started phases of the save; `fail` emits the end events that a killed worker does not send."""

    def __init__(self) -> None:
        self._open: list[CheckpointEvent] = []
        self._over = False

    def begin(self) -> None:
        self._open, self._over = [], False

    def pass_on(self, event: CheckpointEvent) -> None:
        if event.state == "started":
            self._open.append(event)
        elif event.state != "progress":
            self._open = [begun for begun in self._open if begun.phase != event.phase]
            self._over = self._over or event.phase == "total"
        if (event.operation, event.phase, event.state) == ("save", "write", "finished"):
            note_rate(event.checkpoint_id, event.bytes, event.own_seconds)
        plugins.emit(event)

    def fail(self, job: SaveJob, error: BaseException) -> None:
        if self._over:
            return
        seat, place = job.link.seat, job.checkpoint_id
        not_begun = CheckpointEvent(
            "save",
            "total",
            "failed",
            seat.rank,
            None if place is None else os.fspath(place),
            world_size=seat.world_size,
        )
        now, message = time.time(), f"{type(error).__name__}: {error}".partition("\n")[0]
        for begun in reversed(self._open or [not_begun]):
            seconds = None if begun.time is None else now - begun.time
            plugins.emit(replace(begun, state="failed", seconds=seconds, error=message, time=now))
        self._open, self._over = [], True
