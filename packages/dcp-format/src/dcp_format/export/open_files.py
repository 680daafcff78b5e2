"""`OpenFiles`: the shared files that a rank writes, of which few are open at once: descriptors are limited."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dcp_io import RangeSink, Store

__all__ = ["OpenFiles"]

_MOST_OPEN = 32


class OpenFiles:
    """Cache of open files that a rank writes ranges of; the one that was used longest ago is synced and closed first.

    Thread-safe. A context manager, which closes the files without syncing them: call `sync` before.

    Args:
        store: Store of the files, which have been created in full size.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: dict[str, RangeSink] = {}
        self._users: dict[str, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close(sync=False)

    @contextmanager
    def using(self, name: str) -> Iterator[RangeSink]:
        """Open a file if it is not open, and keep it open for the `with` block.

        Raises:
            CheckpointNotFoundError: The file is not there.
            OSError: An earlier file cannot be made durable.
        """
        with self._lock:
            sink = self._open.pop(name, None) or self._store.open_sized(name)
            self._open[name] = sink  # the last one is the most recently used
            self._users[name] = self._users.get(name, 0) + 1
        try:
            self._close_oldest()
            yield sink
        finally:
            with self._lock:
                self._users[name] -= 1

    def sync(self) -> None:
        """Make the files durable and close them. Raises OSError if that fails."""
        while self._open:
            self._close(next(iter(self._open)))

    def _close_oldest(self) -> None:
        with self._lock:
            unused = [name for name in self._open if not self._users[name]]
            oldest = [self._open.pop(name) for name in unused[: max(0, len(self._open) - _MOST_OPEN)]]
        for number, sink in enumerate(oldest):
            try:
                sink.close(sync=True)
            except BaseException:
                for other in oldest[number + 1 :]:
                    other.close(sync=False)
                raise

    def _close(self, name: str) -> None:
        self._open.pop(name).close(sync=True)
