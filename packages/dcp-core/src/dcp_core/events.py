"""Events of saves and loads, for observers and the log: start and end of each phase, and the slowest rank."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from dcp_core import plugins
from dcp_core.hookspecs import CheckpointEvent
from dcp_core.records.protocols import CheckpointId
from dcp_hooks import count_progress
from dcp_manifest.logs import library_logger
from dcp_manifest.schemes import scheme_of
from dcp_ranks import Coordinator

__all__ = ["Operation", "Phase", "note_rate", "write_rate"]

T = TypeVar("T")

_log = library_logger(__name__)
# What is written in less time says little about the storage.
_RATED_BYTES = 1 << 20
_rates: dict[str, float] = {}


def note_rate(event: CheckpointEvent) -> None:
    """Record the write rate of this rank for the scheme of the checkpoint id, if the event is a finished write.

    Writes of less than 1 MiB are ignored. `write_rate` returns the rate.
    """
    if (event.operation, event.phase, event.state) != ("save", "write", "finished") or event.checkpoint_id is None:
        return
    if event.own_seconds and (event.bytes or 0) >= _RATED_BYTES:
        _rates[scheme_of(event.checkpoint_id)] = (event.bytes or 0) / event.own_seconds


def write_rate(checkpoint_id: CheckpointId) -> float | None:
    """Return the write rate of this rank's last save to a checkpoint id with the same scheme, in bytes per second.

    None if this process has not yet saved 1 MiB or more to such a checkpoint id.
    """
    return _rates.get(scheme_of(checkpoint_id))


class Phase:
    """Measurements of a running phase of a save or load on one rank: bytes and seconds."""

    def __init__(self) -> None:
        self.bytes: int | None = None
        """Number of bytes that this rank read from or wrote to storage in the phase; None for other phases."""
        self.bytes_received: int | None = None
        """Number of bytes that other ranks read from storage for this rank; None for phases that read nothing."""
        self.compression: str | None = None
        """What `compression="adaptive"` chose in the phase, and why."""
        self.own_seconds = 0.0

    def timed(self, function: Callable[[], T]) -> Callable[[], T]:
        """Wrap a function so that its duration is added to `own_seconds`, this rank's own work in the phase."""

        def call() -> T:
            start = time.monotonic()
            try:
                return function()
            finally:
                self.own_seconds += time.monotonic() - start

        return call


class Operation:
    """Reporter of one save or load on one rank, which sends events to observers and writes log records.

    Args:
        name: Name of the operation, `save` or `load`.
        coordinator: Coordinator of this operation, which measures the slowest rank of each phase.
        checkpoint_id: Checkpoint id that the caller passed; None if the caller passed a storage instead.
    """

    def __init__(self, name: str, coordinator: Coordinator, checkpoint_id: CheckpointId | None) -> None:
        self._name = name
        self._coordinator = coordinator
        self._checkpoint_id = None if checkpoint_id is None else os.fspath(checkpoint_id)
        self._id = uuid.uuid4().hex
        self._failure_logged = False

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Context manager that reports the start, progress and end of a phase, with duration or error.

        Args:
            name: Name of the phase; `total` for the whole save or load.
        """
        phase = Phase()
        begun = self._notify(name, "started")
        start = time.monotonic()
        try:
            with count_progress(begun):
                yield phase
        except BaseException as error:
            message = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._notify(name, "failed", seconds=time.monotonic() - start, error=message)
            raise
        slowest = self._coordinator.slowest
        rank, longest = (self._coordinator.rank, phase.own_seconds) if slowest is None else slowest
        self._notify(
            name,
            "finished",
            seconds=time.monotonic() - start,
            bytes=phase.bytes,
            bytes_received=phase.bytes_received,
            own_seconds=phase.own_seconds,
            slowest_rank=rank,
            slowest_seconds=longest,
            compression=phase.compression,
        )

    def _notify(self, phase: str, state: str, **facts: Any) -> CheckpointEvent:
        """Send an event of a phase to observers and the log, and return it; `facts` are fields of the event."""
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        facts |= {"world_size": world_size, "operation_id": self._id, "time": time.time()}
        event = CheckpointEvent(self._name, phase, state, rank, self._checkpoint_id, **facts)
        _log.log(self._level(state), "%s", _sentence(event, world_size))
        note_rate(event)
        plugins.emit(event)
        return event

    def _level(self, state: str) -> int:
        """Return the level at which an event is logged. Never a warning: the error of a failure is raised as well."""
        if state == "failed":
            level = logging.DEBUG if self._failure_logged else logging.INFO  # once, by the innermost phase
            self._failure_logged = True
            return level
        # The coordinator speaks for all ranks, except of failures and of its own start.
        return logging.INFO if state == "finished" and self._coordinator.is_coordinator else logging.DEBUG


def _sentence(event: CheckpointEvent, world_size: int) -> str:
    place = f" of {event.checkpoint_id}" if event.checkpoint_id else ""
    text = f"rank {event.rank}: {event.operation}{place}: {event.phase} {event.state}"
    if event.seconds is not None:
        text += f" after {event.seconds:.3f} s"
    if event.bytes is not None:
        text += f", {event.bytes / 1e6:,.1f} MB by this rank"
    if event.bytes_received:
        text += f", {event.bytes_received / 1e6:,.1f} MB from other ranks"
    if world_size > 1 and event.slowest_rank is not None and event.slowest_seconds is not None:
        text += f"; slowest: rank {event.slowest_rank} ({event.slowest_seconds:.3f} s)"
    if event.compression is not None:
        text += f"; {event.compression}"
    return text if event.error is None else f"{text}: {event.error}"
