"""Event of a complete copy: its bytes, the memory that it takes, and how long training waited for it."""

from __future__ import annotations

import os
import time

from dcp_async.queue.jobs import SaveJob
from dcp_core import plugins
from dcp_core.hookspecs import CheckpointEvent

__all__ = ["report_copy"]


def report_copy(job: SaveJob) -> None:
    """Send observers the event of the phase `stage`; nothing for a copy that a stager of the caller's own has made."""
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
