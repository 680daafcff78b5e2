"""Phases of a save in a worker, as reported to observers in the trainer; phases that the worker does not end fail."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from dcp_async.queue.jobs import SaveJob
from dcp_core import plugins
from dcp_core.hookspecs import CheckpointEvent

__all__ = ["ReportedPhases"]


class ReportedPhases:
    """Phases of the running save, and their events for observers.

    Observers rely on an end event for every phase, and for every failed save. A killed worker reports neither.
    """

    def __init__(self) -> None:
        self._open: list[CheckpointEvent] = []
        self._over = False

    def begin(self) -> None:
        """Begin the next save, for which the worker has not reported any phase yet."""
        self._open, self._over = [], False

    def pass_on(self, event: CheckpointEvent) -> None:
        """Record an event of the worker, and notify observers of it."""
        if event.state == "started":
            self._open.append(event)
        else:
            self._open = [begun for begun in self._open if begun.phase != event.phase]
            self._over = self._over or event.phase == "total"
        plugins.emit(event)

    def fail(self, job: SaveJob, error: BaseException) -> None:
        """Notify observers that the save and its open phases failed, unless the worker has reported the end."""
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
