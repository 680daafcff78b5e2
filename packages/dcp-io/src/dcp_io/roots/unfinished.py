"""Unfinished checkpoints: what there is of a save or copy that runs or was interrupted, and where it came from."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from dcp_io.checkpoints.list_checkpoints import running_saves
from dcp_io.stores.store import Entry, Store
from dcp_manifest.errors import CheckpointNotFoundError
from dcp_manifest.folders.file_names import DATA_SUFFIX
from dcp_manifest.printable import printable_bytes

__all__ = ["COPY_JOURNAL", "Unfinished", "describe_unfinished"]

COPY_JOURNAL = ".dcp-promoting"
"""Beginning of the names of the journals of copies: JSON with `from`, the place of the original, and its `bytes`."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A step whose files lack an index, so that it cannot be loaded."""

    step: int
    text: str
    """What is there, and where the original was when it was last seen."""
    is_running: bool
    """Whether a process may be working at it."""


def describe_unfinished(
    step: int, store: Store, entries: tuple[Entry, ...], *, stale_after_seconds: float
) -> Unfinished | None:
    """Describe the files of a step without an index; None if there are no data files.

    Args:
        step: The step.
        store: Its folder.
        entries: Listing of the folder.
        stale_after_seconds: Age at which a save marker of another host counts as dead.

    Raises:
        OSError: The storage failed.
    """
    data = [entry for entry in entries if entry.name.endswith(DATA_SUFFIX)]
    if not data:
        return None
    there = printable_bytes(sum(entry.bytes for entry in data))
    text = f"{store.url} has {len(data)} data files with {there}, and no index"
    journals = [_journal(store, entry) for entry in entries if entry.name.startswith(COPY_JOURNAL)]
    places = sorted({place for place, _ in journals if place})
    whole = max((size for _, size in journals), default=0)
    if places:
        text += f": a copy from {', '.join(places)}"
        text += f", where it has {printable_bytes(whole)}" if whole else ""
    running = running_saves(store, stale_after_seconds=stale_after_seconds)
    if running:
        text += f"; {running[0]} is at work"
    elif places:
        age = time.time() - max(entry.mtime for entry in data)
        text += f", was interrupted {max(age, 0.0):.0f} s ago"
    else:
        text += ": its save was interrupted"
    return Unfinished(step, text, bool(running))


def _journal(store: Store, entry: Entry) -> tuple[str, int]:
    """Return the place of the original, and its size; an empty text and 0 for other contents."""
    try:
        values = json.loads(store.read(entry.name))
        return str(values["from"]), int(values["bytes"])
    except (CheckpointNotFoundError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return "", 0
