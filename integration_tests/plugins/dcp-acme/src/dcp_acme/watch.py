"""An observer: the last operations of this process, with their seconds and bytes."""

from __future__ import annotations

from collections import deque

from dcp_base import CheckpointEvent

__all__ = ["last_operations", "note"]

_KEPT = 100
_finished: deque[CheckpointEvent] = deque(maxlen=_KEPT)


def note(event: CheckpointEvent) -> None:
    """Remember an operation that has ended. This runs in the thread of the save."""
    if event.phase == "total" and event.state in ("finished", "failed"):
        _finished.append(event)


def last_operations() -> list[CheckpointEvent]:
    """The last operations that ended, oldest first."""
    return [*_finished]
