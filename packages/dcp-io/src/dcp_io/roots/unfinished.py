"""Unfinished checkpoints: running or interrupted saves and copies."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from dcp_base.escaping import printable_bytes
from dcp_io.checkpoints.list_checkpoints import running_saves
from dcp_io.saves.cleanup import read_current
from dcp_io.saves.save_files import own_name, temporary_of
from dcp_io.stores.store import Entry, Store
from dcp_manifest.errors import CheckpointNotFoundError
from dcp_manifest.folders.folder import DATA_SUFFIX

COPY_JOURNAL = ".dcp-promoting"
"""Prefix of copies' journals: JSON with `save_id`, `bytes`, and `from`, the original's place."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A step with files, but no index."""

    step: int
    text: str
    """The files, and the place of the original."""
    is_running: bool


def describe_unfinished(
    step: int, store: Store, entries: tuple[Entry, ...], *, stale_after_seconds: float
) -> Unfinished | None:
    """Describe a step's data files without an index. Raises OSError."""
    data = [entry for entry in entries if entry.name.endswith(DATA_SUFFIX)]
    if not data:
        return None
    there = printable_bytes(sum(entry.bytes for entry in data))
    text = f"{store.url} has {len(data)} data file{'s' * (len(data) != 1)} with {there}, and no index"
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
    """Return the journals of ended copies next to a published checkpoint. Raises OSError.

    Another save's journal must be old: a host may still copy its part.
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
    values = _read(store, entry)
    place, size = values.get("from"), values.get("bytes")
    return place if isinstance(place, str) else "", size if isinstance(size, int) else 0


def _read(store: Store, entry: Entry) -> dict[str, Any]:
    try:
        values = json.loads(store.read(entry.name))
    except (CheckpointNotFoundError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
