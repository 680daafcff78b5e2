"""Notes of arrival: empty files beside a checkpoint whose names say to which further tiers it has been promoted.

With them, retention in a near tier knows what it may remove without a request to a far tier, which may be away. A name
alone says everything, so that a listing is enough, and a full disk can take the note.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from dcp_io import Entry, Store
from dcp_manifest import METADATA_NAME

__all__ = [
    "arrival_is_noted",
    "forget_arrival",
    "has_arrived",
    "note_arrival",
    "note_forgone",
    "note_refusal",
    "was_refused",
]

_ARRIVED, _FORGONE, _REFUSED = ".dcp-promoted-", ".dcp-forgone-", ".dcp-refused-"


def note_arrival(store: Store, url: str) -> None:
    """Write the note that the checkpoint in the folder `store` has arrived in the tier at `url`.

    Raises:
        OSError: The storage failed.
    """
    _write(store, _ARRIVED, url, b"")


def note_forgone(store: Store, url: str) -> None:
    """Write the note that the checkpoint in the folder `store` will never be complete in the tier at `url`."""
    _write(store, _FORGONE, url, b"")


def note_refusal(store: Store, url: str, reason: str) -> None:
    """Write the note that the checkpoint in the folder `store` cannot be promoted to the tier at `url`."""
    _write(store, _REFUSED, url, json.dumps({"tier": url, "refused": reason}).encode())


def forget_arrival(store: Store, url: str) -> None:
    """Remove the note of an arrival: the tier at `url` has lost the checkpoint since."""
    for entry in store.list():
        if entry.name.startswith(_prefix(_ARRIVED, url)):
            store.delete(entry.name)


def has_arrived(entries: Iterable[Entry], url: str) -> bool:
    """Whether a checkpoint has arrived in the tier at `url`, or is not to be sent there any more, by a valid note.

    The note of an earlier save of the same step is not valid: the index was another file then.

    Args:
        entries: Listing of the checkpoint's folder.
        url: Path or URI of the further tier.
    """
    return _has_note(entries, _ARRIVED, url) or _has_note(entries, _FORGONE, url)


def arrival_is_noted(entries: Iterable[Entry], url: str) -> bool:
    """Whether a checkpoint has a valid note that the tier at `url` has it. Arguments: see `has_arrived`."""
    return _has_note(entries, _ARRIVED, url)


def was_refused(entries: Iterable[Entry], url: str) -> bool:
    """Whether a checkpoint has a valid note that it cannot be promoted to a tier. Arguments: see `has_arrived`."""
    return _has_note(entries, _REFUSED, url)


def _write(store: Store, kind: str, url: str, data: bytes) -> None:
    entries = store.list()
    name = _name(entries, kind, url)
    if name is None:
        return
    store.publish(name, data, sync=False)
    for entry in entries:
        if entry.name.startswith(_prefix(kind, url)) and entry.name != name:  # of an earlier save of the step
            store.delete(entry.name)


def _has_note(entries: Iterable[Entry], kind: str, url: str) -> bool:
    entries = tuple(entries)
    name = _name(entries, kind, url)
    return name is not None and any(entry.name == name for entry in entries)


def _name(entries: Iterable[Entry], kind: str, url: str) -> str | None:
    """Return the name of a note for the index in a listing; None if there is no index."""
    index = next((entry for entry in entries if entry.name == METADATA_NAME), None)
    return None if index is None else f"{_prefix(kind, url)}{_digest(f'{index.bytes} {index.mtime!r}')}.json"


def _prefix(kind: str, url: str) -> str:
    return f"{kind}{_digest(url)}-"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()
