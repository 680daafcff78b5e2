"""Events of saves and loads for observers and the log."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from dcp_base import installed
from dcp_base.hookspecs import CheckpointEvent
from dcp_base.logs import library_logger
from dcp_base.progress import count_progress
from dcp_base.schemes import scheme_of
from dcp_core.records.protocols import CheckpointId
from dcp_ranks import Coordinator

T = TypeVar("T")
LOGGER_NAME = "dcp_core"
"""The logger of `save` and `load`, and parent of the others of this package."""
_log = library_logger(__name__)
# The rate of a smaller write says little about the storage.
_RATED_BYTES = 1 << 20
_rates: dict[str, float] = {}


def note_rate(checkpoint_id: CheckpointId | None, count: int | None, seconds: float | None) -> None:
    """Record this rank's write rate, from 1 MiB on."""
    if checkpoint_id is not None and seconds and (count or 0) >= _RATED_BYTES:
        _rates[scheme_of(checkpoint_id)] = (count or 0) / seconds


def write_rate(checkpoint_id: CheckpointId) -> float | None:
    """Return this rank's last rate for an id's scheme, in bytes per second."""
    return _rates.get(scheme_of(checkpoint_id))


@dataclass(slots=True)
class Phase:
    """A running phase on one rank."""

    bytes: int | None = None
    """Bytes read or written; None for other phases."""
    bytes_received: int | None = None
    own_seconds: float = 0.0

    def timed(self, function: Callable[[], T]) -> Callable[[], T]:
        """Add a function's duration to `own_seconds`."""

        def call() -> T:
            start = time.monotonic()
            try:
                return function()
            finally:
                self.own_seconds += time.monotonic() - start

        return call


class Operation:
    """Sends the events of a save or load to observers and the log."""

    def __init__(self, name: str, coordinator: Coordinator, checkpoint_id: CheckpointId | None) -> None:
        self._name = name
        self._coordinator = coordinator
        self._checkpoint_id = None if checkpoint_id is None else os.fspath(checkpoint_id)
        self._reports = installed.observed or _log.isEnabledFor(logging.INFO)
        self._id = uuid.uuid4().hex if self._reports else None
        self._failure_logged = False

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Report a phase (`total` for the operation)."""
        phase = Phase()
        with self._reported(name, phase) if self._reports else nullcontext():
            yield phase
        if (self._name, name) == ("save", "write"):
            note_rate(self._checkpoint_id, phase.bytes, phase.own_seconds)

    @contextmanager
    def _reported(self, name: str, phase: Phase) -> Iterator[None]:
        begun = self._notify(name, "started")
        start = time.monotonic()
        try:
            with count_progress(begun):
                yield
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
        )

    def _notify(self, phase: str, state: str, **facts: Any) -> CheckpointEvent:
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        facts |= {"world_size": world_size, "operation_id": self._id, "time": time.time()}
        event = CheckpointEvent(self._name, phase, state, rank, self._checkpoint_id, **facts)
        if _log.isEnabledFor(level := self._level(state)):
            _log.log(level, "%s", _sentence(event, world_size))
        installed.emit(event)
        return event

    def _level(self, state: str) -> int:
        """Never a warning, because a failure also raises its error; only the coordinator logs at INFO."""
        is_first = state == "failed" and not self._failure_logged  # of the innermost phase
        self._failure_logged |= is_first
        return logging.INFO if self._coordinator.is_coordinator and (is_first or state == "finished") else logging.DEBUG


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
    return text if event.error is None else f"{text}: {event.error}"
