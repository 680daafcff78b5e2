"""Open data files."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dcp_io.reading.read_plan import Wanted
from dcp_io.stores.store import Source, Store, SupportsFetch, SupportsReadAhead
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError


class OpenFile:
    """A data file that closes itself after its last planned read.

    Raises CheckpointNotFoundError or, for a short file, CorruptCheckpointError.
    """

    def __init__(self, store: Store, name: str, wanted: Sequence[Wanted]) -> None:
        self._lock = threading.Lock()
        try:
            self.source: Source = store.open(name)
            size = self.source.size()
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(f"{error}; {wanted[0].request.key!r} is stored in it") from error
        self.fetch = self.source.fetch if isinstance(self.source, SupportsFetch) else None
        self._will_need = self.source.will_need if isinstance(self.source, SupportsReadAhead) else None
        self.users = 0
        for one in wanted:
            if one.base + one.stop > size:
                self.source.close()
                raise CorruptCheckpointError(
                    f"the file has {size} bytes but {one.base + one.stop} are needed: it is truncated or swapped",
                    file=name,
                    key=one.request.key,
                    offset=one.request.item.offset,
                )

    def announce(self, offset: int, size: int) -> None:
        """Hint that bytes are read soon."""
        if self._will_need is not None:
            self._will_need(offset, size)

    def release(self) -> None:
        """End one read; the last one closes the file."""
        with self._lock:
            self.users -= 1
            if self.users == 0:
                self.source.close()
