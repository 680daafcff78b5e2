"""Reader leases: signs of processes that read a checkpoint, so that it is not removed meanwhile.

A reader leaves its sign before it looks for `REMOVING`; a remover leaves `REMOVING` before looking for signs: so one
of them sees the other, whatever the storage is.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from types import TracebackType
from typing import TYPE_CHECKING

from dcp_io.saves.marker_owner import ProcessIdentity, can_be_checked, is_gone, this_process
from dcp_io.saves.marker_renewal import Renewal
from dcp_io.stores.store import Entry, Store
from dcp_manifest.errors import CheckpointNotFoundError, DcpError
from dcp_manifest.folders.folder_notes import REMOVING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["READING_PREFIX", "REMOVING", "ReadingSign", "announce_removal", "is_dead_sign", "live_readers"]

READING_PREFIX = ".dcp-reading-"
_MAX_BYTES = 1 << 16


def announce_removal(store: Store) -> None:
    """Leave the sign that the checkpoint in a folder is about to be removed, before looking for readers.

    It is an empty file: that takes no space, so that checkpoints can be removed from a disk that is full.

    Raises:
        OSError: The storage did not take it.
    """
    store.publish(REMOVING, b"", sync=False)


class ReadingSign:
    """This process's lease on a checkpoint: a sign file, renewed as long as the block lasts.

    Args:
        store: The checkpoint's folder.
        stale_after_seconds: Time without renewal after which other hosts take the reader for dead.

    Raises:
        OSError: The storage did not take the sign; at the beginning of the block.

    Example:
        ```python
        from dcp_io import LocalStore, ReadingSign

        store = LocalStore("step-1")
        store.make()
        store.publish("weights", b"1234")
        with ReadingSign(store, stale_after_seconds=600):  # `dcp rm` and the manager leave the folder alone
            store.read("weights")
        ```
    """

    def __init__(self, store: Store, *, stale_after_seconds: float) -> None:
        self.name = f"{READING_PREFIX}{secrets.token_hex(6)}"
        self._store = store
        self._renewal = Renewal(store, self.name, stale_after_seconds)

    def __enter__(self) -> Self:
        self._store.publish(self.name, json.dumps(this_process().to_dict()).encode(), sync=False)
        self._renewal.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._renewal.stop()
        with contextlib.suppress(OSError, DcpError):
            self._store.delete(self.name)


def live_readers(store: Store, *, stale_after_seconds: float) -> list[str]:
    """Return the names of the signs of readers that are not known to be dead; empty if there are none.

    Args:
        store: The checkpoint's folder.
        stale_after_seconds: After so long without a sign of life a reader on another host counts as dead.
    """
    signs = [entry for entry in store.list() if entry.name.startswith(READING_PREFIX)]
    return [entry.name for entry in signs if not is_dead_sign(store, entry, stale_after_seconds=stale_after_seconds)]


def is_dead_sign(store: Store, entry: Entry, *, stale_after_seconds: float) -> bool:
    """Whether a reader's sign is that of a dead process, or gone.

    A process that can be checked from here is alive as long as it runs, however old its sign is. For others a time
    far in the future proves as little as one long ago.
    """
    data = b""
    try:
        if entry.bytes <= _MAX_BYTES:
            data = store.read(entry.name)
    except CheckpointNotFoundError:
        return True
    except DcpError as error:
        if isinstance(error, OSError):
            raise
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        process = ProcessIdentity.from_dict(json.loads(data))
        if can_be_checked(process):
            return is_gone(process)
    return abs(time.time() - entry.mtime) > stale_after_seconds
