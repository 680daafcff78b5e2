"""Notes that keepers of checkpoints leave beside an index: names of the files, and the facts that discovery uses.

Nothing here decides what a keeper does; `dcp_manager` writes the note and the quarantine, `dcp_io` the removal sign.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

__all__ = ["NOTE", "QUARANTINE", "REMOVING", "noted_step", "put_aside_reason", "quarantine_reason"]

NOTE = ".dcp-note.json"
"""The manager's note on a checkpoint: its step, its metrics, the process that saved it."""
QUARANTINE = ".dcp-quarantined.json"
"""Sign that the checkpoint was found damaged, with the reason."""
REMOVING = ".dcp-removing"
"""Sign that the checkpoint is about to be removed."""


def put_aside_reason(names: Collection[str]) -> str | None:
    """Return why no reader should choose a checkpoint, from the names of the files beside it; None if one may."""
    if REMOVING in names:
        return f"it is being removed ({REMOVING})"
    if QUARANTINE in names:
        return f"it was put aside as damaged ({QUARANTINE})"
    return None


def noted_step(data: bytes) -> int | None:
    """Return the step in the manager's note; None if the bytes are no note, or name no step."""
    step = _fact(data, "step")
    return step if type(step) is int and step >= 0 else None


def quarantine_reason(data: bytes) -> str:
    """Return why a checkpoint was put aside as damaged; `unknown` if the bytes do not say."""
    reason = _fact(data, "reason")
    return "unknown" if reason is None else str(reason)


def _fact(data: bytes, name: str) -> Any:
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return facts.get(name) if isinstance(facts, dict) else None
