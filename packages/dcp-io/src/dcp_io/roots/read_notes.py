"""Reading of the notes beside a checkpoint, which may be missing, or another user's."""

from __future__ import annotations

from dcp_io.roots.records import Note
from dcp_io.stores.store import Store
from dcp_manifest.errors import CheckpointNotFoundError
from dcp_manifest.logs import library_logger

__all__ = ["read_if_allowed", "read_if_there", "read_note"]

_log = library_logger(__name__)


def read_if_there(store: Store, name: str) -> bytes | None:
    """Return the bytes of an object; None if it is missing."""
    try:
        return store.read(name)
    except CheckpointNotFoundError:
        return None


def read_if_allowed(store: Store, name: str) -> bytes | None:
    """Return the bytes of an object; None if it is missing or, with a warning, if this user may not read it."""
    try:
        return read_if_there(store, name)
    except PermissionError as error:
        _log.warning("a note is passed over: %s", error)
        return None


def read_note(store: Store, name: str) -> Note | None:
    """Return a note; None if it is missing, or is no note."""
    return Note.from_bytes(read_if_there(store, name) or b"")
