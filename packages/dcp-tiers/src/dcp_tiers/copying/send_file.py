"""`send_file`: copy of one data file between stores, and the journal of the files that a target has got."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

from dcp_io import PassingCrcs, Store
from dcp_manifest import CheckpointNotFoundError

__all__ = ["JOURNAL", "read_journal", "send_file", "size_of"]

JOURNAL = ".dcp-promoting.json"
"""Name of the file in the target that lists the data files that are there, verified and durable."""
_PIECE_BYTES = 4 << 20


def send_file(source: Store, target: Store, name: str, crcs: PassingCrcs, passed: Callable[[int], object]) -> None:
    """Copy one data file, whose last byte is written only after all have passed their CRCs."""
    target.delete(name)  # what an interrupted copy has left of it
    memory = memoryview(bytearray(_PIECE_BYTES))
    with contextlib.closing(source.open(name)) as opened:
        size = opened.size()
        sink = target.create(name)
        try:
            for position in range(0, size, _PIECE_BYTES):
                piece = memory[: min(_PIECE_BYTES, size - position)]
                opened.read_into(position, [piece])
                crcs.take(position, piece)
                sink.write([piece])
                passed(len(piece))
            sink.close(sync=True)
        except BaseException:
            sink.abort()
            raise


def read_journal(target: Store, save_id: str, name: str = JOURNAL) -> dict[str, int]:
    """Return the files of a save that a journal lists: name → size in bytes."""
    try:
        values = json.loads(target.read(name))
        return dict(values["files"]) if values["save_id"] == save_id else {}
    except (CheckpointNotFoundError, ValueError, KeyError, TypeError):
        return {}


def size_of(store: Store, name: str) -> int | None:
    """Return the size of a file; None if it is missing."""
    try:
        return store.size(name)
    except CheckpointNotFoundError:
        return None
