"""Saves in a worker process, with caches of structures and mapped memory."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dcp_async.errors import WorkerError
from dcp_async.queue.portable import PlannedElsewhere, StagedPlanner
from dcp_async.queue.save_agreement import Meeting, Ticket
from dcp_async.savers.worker_messages import (
    EventSent,
    Failed,
    Forget,
    ForgetArena,
    Hello,
    Logged,
    NewArena,
    NewGroup,
    NewStructure,
    NewWaves,
    Save,
    Saved,
    Warned,
)
from dcp_async.staging.copy_state import Structure, staged_tensors
from dcp_async.staging.skeleton import fill
from dcp_async.staging.waves import WaveFeed, WavePlanner, reserve_addresses
from dcp_core import DcpError, SavePlanner, StorageWriter, plugins
from dcp_core.arguments import adopted, resolve_storage
from dcp_core.saving import save_with
from dcp_io.lent_memory import FileId
from dcp_ranks.choose_coordinator import assume_job_size
from dcp_ranks.phases.phases import failure_of
from dcp_ranks.transport.store_wire import prefixed_store

Send = Callable[[object], None]


@dataclass(slots=True)
class _Known:
    structure: Structure
    objects: dict[int, Any] = field(default_factory=dict)
    means: bytes = b""
    arena: int = -1
    tensors: list[torch.Tensor] = field(default_factory=list)
    addresses: torch.Tensor | None = None


class WorkerSaves:
    """Runner of saves in a worker process, with its caches."""

    def __init__(self, send: Send, hello: Hello) -> None:
        self._send = send
        self._options = hello.options
        self._arenas: dict[int, torch.Tensor] = {}
        self._structures: dict[str, _Known] = {}
        self._meetings: dict[str, Meeting] = {}
        self._process_group: tuple[str, int] | None = None
        self._waves: tuple[NewWaves, socket.socket] | None = None
        torch.set_num_threads(hello.options.torch_threads)
        # Most saves need this import; make it before the first one.
        with contextlib.suppress(DcpError):
            plugins.storage_for("file").load_writer()
        _forward(send, hello.log_level)

    def handle(self, message: Any) -> None:
        """Run a save, or update the caches."""
        if isinstance(message, tuple):
            self._take_descriptor(*message)
        elif isinstance(message, NewStructure):
            self._structures[message.structure.identifier] = _Known(message.structure)
        elif isinstance(message, Forget):
            self._structures.pop(message.identifier, None)
        elif isinstance(message, ForgetArena):
            self._arenas.pop(message.number, None)
            self._unmap(message.number)
        elif isinstance(message, NewGroup):
            self._meetings[message.seat.key] = Meeting(message.seat)
        else:
            self._reply_to(message)

    def _take_descriptor(self, message: NewArena | NewWaves, descriptor: int) -> None:
        if isinstance(message, NewWaves):
            self._waves = message, socket.socket(fileno=descriptor)
        else:
            self._map(message, descriptor)

    def _map(self, arena: NewArena, descriptor: int) -> None:
        try:
            self._arenas[arena.number] = _mapped(descriptor, arena.nbytes)
        finally:
            os.close(descriptor)
        self._unmap(arena.number)

    def _unmap(self, number: int) -> None:
        for known in self._structures.values():
            if known.arena == number:
                known.arena, known.tensors = -1, []

    def _reply_to(self, save: Save) -> None:
        try:
            self._send(self._save(save))
        except BaseException as error:  # noqa: BLE001 - the caller's future raises it
            rank = self._meetings[save.group].seat.rank if save.group in self._meetings else 0
            self._send(Failed(save.number, failure_of(rank, error)))

    @contextlib.contextmanager
    def _feed(self, save: Save) -> Iterator[WaveFeed | None]:
        waves, self._waves = self._waves, None
        if waves is None:
            yield None
            return
        message, connection = waves
        with connection:
            known = self._structures[save.structure]
            if known.addresses is None:
                known.addresses = reserve_addresses(known.structure.wave_bytes)
            memory, resident_bytes = self._arenas[save.arena], known.structure.resident_bytes
            feed = WaveFeed(connection, memory, resident_bytes, message.piece_bytes, known.addresses, message.digests)
            with contextlib.closing(feed):
                yield feed

    def _save(self, save: Save) -> Saved:
        self._learn(save)
        meeting = self._meetings[save.group]
        with assume_job_size(meeting.seat.job_size), contextlib.ExitStack() as ends:
            try:
                coordinator = meeting.coordinator(save.ticket)
            except BaseException as error:
                meeting.withdraw(save.ticket, error)
                raise
            try:
                if self._options.process_group:
                    self._join_process_group(meeting, save.ticket)
                feed = ends.enter_context(self._feed(save))
                state, writer, planner = self._what(save)
                if feed is not None:
                    planner = WavePlanner.of(planner, feed)
            except BaseException as error:
                coordinator.__exit__(type(error), error, error.__traceback__)
                raise
            metadata = save_with(
                coordinator,
                state,
                checkpoint_id=save.checkpoint_id,
                storage_writer=writer,
                planner=planner,
                use_collectives=save.use_collectives,
                group=save.group,
            )
        meta = writer.storage_meta()
        if writer.reads_back and meta is not None and meta.save_id is not None:
            return Saved(save.number, meta.save_id, None)
        return Saved(save.number, None, pickle.dumps(dict(vars(metadata)), protocol=5))

    def _learn(self, save: Save) -> None:
        """Update the cache before anything can fail: the next message has only the differences."""
        if save.surroundings is not None:
            save.surroundings.apply()
        known = self._structures.get(save.structure)
        if known is not None:  # if it is missing, `_save` fails on all ranks
            known.objects.update(save.objects)
            known.means = known.means if save.means is None else save.means

    def _what(self, save: Save) -> tuple[dict[Any, Any], StorageWriter, SavePlanner | None]:
        known = self._structures[save.structure]
        if known.arena != save.arena:
            known.arena = save.arena
            known.tensors = staged_tensors(known.structure, self._arenas[save.arena], known.addresses)
        objects = (known.objects[number] for number in range(len(known.objects)))
        state = fill(known.structure.skeleton, iter(known.tensors), objects)
        writer, planner, plan = _unpickled(known.means)
        writer, planner = adopted(writer, StorageWriter), adopted(planner, SavePlanner)
        if isinstance(plan, PlannedElsewhere) and planner is not None:
            planner, state = StagedPlanner(planner, plan, state), {}
        if writer is None:
            writer = resolve_storage(None, save.checkpoint_id, "writer")
        return state, writer, planner

    def _join_process_group(self, meeting: Meeting, ticket: Ticket) -> None:
        seat, wanted = meeting.seat, (meeting.seat.key, ticket.epoch)
        if seat.address is None or self._process_group == wanted:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        store: Any = prefixed_store(f"process-group/{ticket.epoch}", seat.address.connect())
        timeout = timedelta(seconds=seat.timeout_seconds)
        dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.world_size, timeout=timeout)
        self._process_group = wanted


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # Map all pages in one call: they are in use, and a fault for each would take longer.
    mapped = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE)
    FileId.note(mapped, descriptor)  # a storage that has lent this memory need not copy from it
    return torch.from_numpy(np.frombuffer(mapped, np.uint8))


def _unpickled(means: bytes) -> tuple[StorageWriter | None, SavePlanner | None, Any]:
    try:
        found: tuple[StorageWriter | None, SavePlanner | None, Any] = pickle.loads(means)
    except Exception as error:
        raise WorkerError(
            "the storage writer or the planner cannot be made in the saver's process: "
            f"{type(error).__name__}: {error}. Its class, and those of what it holds, must be in modules that can be "
            "imported there; a class of the trainer's script (__main__) cannot. Move it to a module, or use the thread "
            "saver"
        ) from error
    return found


class _LogHandler(logging.Handler):
    def __init__(self, send: Send, level: int) -> None:
        super().__init__(level)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(Logged(record.name, record.levelno, record.getMessage()))


def _forward(send: Send, log_level: int) -> None:
    plugins.divert_events(lambda event: send(EventSent(event)))
    root = logging.getLogger()
    root.setLevel(log_level)
    root.addHandler(_LogHandler(send, log_level))

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        send(Warned(pickle.dumps(category), str(message)))

    warnings.simplefilter("always")
    warnings.showwarning = show
