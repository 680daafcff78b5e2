"""Notes of arrival: small files beside a checkpoint that say to which further tiers it has been promoted.

With them, retention in a near tier knows what it may remove without a request to a far tier, which may be away.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from dcp_io import Entry, Store
from dcp_manifest import METADATA_NAME, CheckpointNotFoundError

__all__ = ["has_arrived", "note_arrival", "note_name", "note_refusal", "was_refused"]


def note_name(url: str) -> str:
    """Return the name of the note that a checkpoint has arrived in the tier at `url`."""
    return f".dcp-promoted-{hashlib.blake2b(url.encode(), digest_size=8).hexdigest()}.json"


def note_arrival(store: Store, url: str, save_id: str) -> None:
    """Write the note that the checkpoint in the folder `store` has arrived in the tier at `url`."""
    index = _index_entry(store.list())
    if index is not None:
        values = {"tier": url, "save_id": save_id, "index": [index.bytes, index.mtime]}
        store.publish(note_name(url), json.dumps(values).encode(), sync=False)


def note_refusal(store: Store, url: str, reason: str) -> None:
    """Write the note that the checkpoint in the folder `store` cannot be promoted to the tier at `url`."""
    index = _index_entry(store.list())
    if index is not None:
        values = {"tier": url, "refused": reason, "index": [index.bytes, index.mtime]}
        store.publish(_refusal_name(url), json.dumps(values).encode(), sync=False)


def was_refused(store: Store, entries: Iterable[Entry], url: str) -> bool:
    """Whether a checkpoint has a valid note that it cannot be promoted to a tier. Arguments: see `has_arrived`."""
    return _has_note(store, entries, _refusal_name(url))


def _refusal_name(url: str) -> str:
    return note_name(f"refused by {url}")


def has_arrived(store: Store, entries: Iterable[Entry], url: str) -> bool:
    """Whether a checkpoint has a valid note of its arrival in the tier at `url`.

    The note of an earlier save of the same step is not valid: the index was another file then.

    Args:
        store: The checkpoint's folder.
        entries: Listing of the folder.
        url: Path or URI of the further tier.
    """
    return _has_note(store, entries, note_name(url))


def _has_note(store: Store, entries: Iterable[Entry], name: str) -> bool:
    entries = list(entries)
    index = _index_entry(entries)
    if index is None or not any(entry.name == name for entry in entries):
        return False
    try:
        noted = json.loads(store.read(name))["index"]
    except (CheckpointNotFoundError, ValueError, KeyError, TypeError):
        return False
    return bool(noted == [index.bytes, index.mtime])


def _index_entry(entries: Iterable[Entry]) -> Entry | None:
    return next((entry for entry in entries if entry.name == METADATA_NAME), None)
