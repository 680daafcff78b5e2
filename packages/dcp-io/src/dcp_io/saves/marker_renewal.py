"""Renewal thread that keeps a save's marker fresh while the save runs."""

from __future__ import annotations

import contextlib
import threading

from dcp_io.stores.store import Store
from dcp_manifest.errors import CheckpointNotFoundError

__all__ = ["Renewal"]

_MIN_SECONDS, _MAX_SECONDS = 0.1, 60.0


class Renewal:
    """Daemon thread that renews a save marker, from `start` to `stop`, before the marker becomes stale.

    If the storage fails, the thread tries again at the next renewal; if the marker is gone, it sets `lost` and ends.

    Args:
        store: The checkpoint's folder.
        name: File name of the marker.
        stale_after_seconds: Time without renewal after which the marker is stale.
    """

    def __init__(self, store: Store, name: str, stale_after_seconds: float) -> None:
        self._store = store
        self._name = name
        self._interval_seconds = min(_MAX_SECONDS, max(_MIN_SECONDS, stale_after_seconds / 10))
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost = False
        """Whether the marker has disappeared."""

    def start(self) -> None:
        """Start the renewal thread."""
        self._thread = threading.Thread(target=self._run, name="dcp-io-marker", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Ask the renewal thread to end, without waiting for its end."""
        self._stopping.set()

    def stop(self) -> None:
        """Stop the renewal thread, and wait for its end. May be called again, and without `start`."""
        self.cancel()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_seconds) and not self.lost:
            with contextlib.suppress(OSError):
                self._touch()

    def _touch(self) -> None:
        try:
            self._store.touch(self._name)
        except CheckpointNotFoundError:
            self.lost = True
