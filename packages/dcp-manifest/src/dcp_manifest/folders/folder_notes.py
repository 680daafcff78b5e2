"""Notes on a checkpoint beside its index (manager's note, quarantine, removal): file names, and parsing for discovery.

`dcp_manager` writes the note and the quarantine, and `dcp_io` announces removals.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

__all__ = ["NOTE", "QUARANTINE", "REMOVING", "noted_step", "put_aside_reason", "quarantine_reason"]

NOTE = ".dcp-note.json"
"""Name of the file with the checkpoint manager's note: training step, metrics, and the process that saved."""
QUARANTINE = ".dcp-quarantined.json"
"""Name of the file that quarantines a checkpoint as damaged, and contains the reason."""
REMOVING = ".dcp-removing"
"""Name of the file that announces the removal of a checkpoint."""


def put_aside_reason(names: Collection[str]) -> str | None:
    """Return the reason why readers should skip a checkpoint (quarantined, being removed); None if they may use it.

    Args:
        names: Names of the files in the checkpoint's folder.
    """
    if REMOVING in names:
        return f"it is being removed ({REMOVING})"
    if QUARANTINE in names:
        return f"it was put aside as damaged ({QUARANTINE})"
    return None


def noted_step(data: bytes) -> int | None:
    """Parse the training step from the manager's note; None if the bytes are not a note, or the note has no step."""
    step = _fact(data, "step")
    return step if type(step) is int and step >= 0 else None


def quarantine_reason(data: bytes) -> str:
    """Parse the reason from the contents of a quarantine file; `unknown` if the contents have no reason."""
    reason = _fact(data, "reason")
    return "unknown" if reason is None else str(reason)


def _fact(data: bytes, name: str) -> Any:
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return facts.get(name) if isinstance(facts, dict) else None
