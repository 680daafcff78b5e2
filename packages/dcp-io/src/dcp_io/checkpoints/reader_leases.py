"""Reader leases: small files that keep a checkpoint from being removed while a process reads it.

A reader writes its lease before it checks for the file `REMOVING`; a process that removes the checkpoint writes
`REMOVING` before it checks for leases. So at least one of the two processes notices the other, on any storage.
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
    """Announce that the checkpoint in a folder will be removed; call this before `live_readers`.

    Writes an empty file, which takes no space: checkpoints can be removed even from a full disk.

    Raises:
        OSError: The file could not be written.
    """
    store.publish(REMOVING, b"", sync=False)


class ReadingSign:
    """Lease of this process on a checkpoint, as a context manager: a file that is renewed until the block ends.

    Args:
        store: The checkpoint's folder.
        stale_after_seconds: Time without renewal after which other hosts consider the reader dead.

    Raises:
        OSError: The lease could not be written, on entering the block.

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
    """Return the file names of the leases whose readers may be alive; an empty list if no reader is.

    Args:
        store: The checkpoint's folder.
        stale_after_seconds: A reader on another host counts as dead when its lease has not been renewed for this long.
    """
    signs = [entry for entry in store.list() if entry.name.startswith(READING_PREFIX)]
    return [entry.name for entry in signs if not is_dead_sign(store, entry, stale_after_seconds=stale_after_seconds)]


def is_dead_sign(store: Store, entry: Entry, *, stale_after_seconds: float) -> bool:
    """Whether a reader's lease is gone, or belongs to a dead process.

    A process on this host is alive as long as it runs, however old its lease is. A process on another host counts as
    dead if the modification time of its lease is too old, or far in the future.

    Args:
        store: The checkpoint's folder.
        entry: The lease in the folder's listing.
        stale_after_seconds: Limit of the difference between now and the lease's modification time, for other hosts.

    Raises:
        OSError: The storage failed.
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
