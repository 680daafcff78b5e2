"""Notes on a checkpoint beside its index (manager's note, quarantine, removal): file names, and parsing for discovery.

`dcp_manager` writes the note and the quarantine, and `dcp_io` announces removals.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

__all__ = ["NOTE", "QUARANTINE", "REMOVING", "noted_step", "put_aside_reason", "quarantine_reason"]

NOTE = ".dcp-note.json"
"""File with the manager's note on a checkpoint: its step, its metrics, the process that saved it."""
QUARANTINE = ".dcp-quarantined.json"
"""File that quarantines a checkpoint as damaged, with the reason."""
REMOVING = ".dcp-removing"
"""File that announces the removal of a checkpoint."""


def put_aside_reason(names: Collection[str]) -> str | None:
    """Return why readers should skip a checkpoint, by the names of files beside its index; None if they may use it."""
    if REMOVING in names:
        return f"it is being removed ({REMOVING})"
    if QUARANTINE in names:
        return f"it was put aside as damaged ({QUARANTINE})"
    return None


def noted_step(data: bytes) -> int | None:
    """Parse the step from the manager's note; None if the bytes are not a note, or the note has no step."""
    step = _fact(data, "step")
    return step if type(step) is int and step >= 0 else None


def quarantine_reason(data: bytes) -> str:
    """Parse the reason for a quarantine; `unknown` if the bytes have none."""
    reason = _fact(data, "reason")
    return "unknown" if reason is None else str(reason)


def _fact(data: bytes, name: str) -> Any:
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return facts.get(name) if isinstance(facts, dict) else None
