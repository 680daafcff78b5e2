"""Open data files: a file is opened when its reads are planned, and closed after the last read."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dcp_io.reading.read_plan import Wanted
from dcp_io.stores.store import Source, Store
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError

__all__ = ["OpenFile"]


class OpenFile:
    """A data file that closes itself after its last planned read, which keeps the number of open files small.

    The constructor checks that the file is long enough for every request, before any read is planned.

    Args:
        store: The checkpoint's folder.
        name: Name of the file.
        wanted: All requests for the file; at least one.

    Raises:
        CheckpointNotFoundError: The file is missing; the message has its name and a key.
        CorruptCheckpointError: The file is too short; the message has its name, the key and the item's offset.
    """

    def __init__(self, store: Store, name: str, wanted: Sequence[Wanted]) -> None:
        self._lock = threading.Lock()
        try:
            self.source: Source = store.open(name)
            size = self.source.size()
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(f"{error}; {wanted[0].request.key!r} is stored in it") from error
        self.users = 0
        """Number of remaining reads."""
        for one in wanted:
            if one.base + one.stop > size:
                self.source.close()
                raise CorruptCheckpointError(
                    f"the file has {size} bytes but {one.base + one.stop} are needed: it is truncated or swapped",
                    file=name,
                    key=one.request.key,
                    offset=one.request.item.offset,
                )

    def release(self) -> None:
        """Count one read as done; after the last read, close the file."""
        with self._lock:
            self.users -= 1
            if self.users == 0:
                self.source.close()
