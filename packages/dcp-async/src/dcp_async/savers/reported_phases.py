"""Events of saves in a worker process for the observers in the trainer, with failure events if the worker is killed."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from dcp_async.queue.jobs import SaveJob
from dcp_core import plugins
from dcp_core.hookspecs import CheckpointEvent
from dcp_core.toolkit import note_rate

__all__ = ["ReportedPhases"]


class ReportedPhases:
    """Record of the started phases of the save that runs in the worker.

    Observers need an end event for every phase and every save. A killed worker sends none, so `fail` emits them.
    """

    def __init__(self) -> None:
        self._open: list[CheckpointEvent] = []
        self._over = False

    def begin(self) -> None:
        """Forget the phases of the last save, because the next save begins."""
        self._open, self._over = [], False

    def pass_on(self, event: CheckpointEvent) -> None:
        """Record an event that the worker has sent, and pass it to the observers in this process."""
        if event.state == "started":
            self._open.append(event)
        elif event.state != "progress":
            self._open = [begun for begun in self._open if begun.phase != event.phase]
            self._over = self._over or event.phase == "total"
        note_rate(event)
        plugins.emit(event)

    def fail(self, job: SaveJob, error: BaseException) -> None:
        """Emit `failed` events for a save and its unfinished phases, unless the worker has reported the save's end.

        Args:
            job: Save that failed.
            error: Exception of the save.
        """
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
