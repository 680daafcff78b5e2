"""Unfinished checkpoints: what there is of a save or copy that runs or was interrupted, and where it came from."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from dcp_io.checkpoints.list_checkpoints import running_saves
from dcp_io.saves.current_checkpoint import read_current
from dcp_io.saves.own_files import own_name, temporary_of
from dcp_io.stores.store import Entry, Store
from dcp_manifest.errors import CheckpointNotFoundError
from dcp_manifest.folders.file_names import DATA_SUFFIX
from dcp_manifest.printable import printable_bytes

__all__ = ["COPY_JOURNAL", "Unfinished", "describe_unfinished", "ended_journals"]

COPY_JOURNAL = ".dcp-promoting"
"""Beginning of the names of journals of copies: JSON with `save_id`, `bytes`, and `from`, the place of the original.

Other files may begin so, too: `own_name` tells them apart.
"""


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
    journals = [_journal(store, entry) for entry in _journals(entries)]
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


def ended_journals(store: Store, entries: tuple[Entry, ...], *, stale_after_seconds: float) -> list[Entry]:
    """Return the journals beside a published checkpoint of which no copy will go on.

    They are of the published save itself, whose promoter was killed before it removed them, or have not been written to
    for `stale_after_seconds`: those of a later save, of which a host may yet bring its part, are spared until then.

    Raises:
        OSError: The storage failed.
    """
    journals = _journals(entries)
    if not journals or running_saves(store, stale_after_seconds=stale_after_seconds):
        return []
    save_id, now = read_current(store).save_id, time.time()
    return [
        entry
        for entry in journals
        if now - entry.mtime > stale_after_seconds
        or (save_id is not None and _read(store, entry).get("save_id") == save_id)
    ]


def _journals(entries: tuple[Entry, ...]) -> list[Entry]:
    named = [entry for entry in entries if entry.name.startswith(COPY_JOURNAL)]
    return [entry for entry in named if own_name(entry.name) is not None and temporary_of(entry.name) is None]


def _journal(store: Store, entry: Entry) -> tuple[str, int]:
    """Return the place of the original, and its size; an empty text and 0 for other contents."""
    try:
        values = _read(store, entry)
        return str(values["from"]), int(values["bytes"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return "", 0


def _read(store: Store, entry: Entry) -> dict[str, Any]:
    """Return what a journal says; nothing if it has gone, or holds something else."""
    try:
        values = json.loads(store.read(entry.name))
    except (CheckpointNotFoundError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
