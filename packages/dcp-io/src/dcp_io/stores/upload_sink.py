"""`UploadSink`: base class of sinks that upload to remote storages; counts bytes, and ends an upload exactly once."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence

from dcp_io.stores.store import Sink

__all__ = ["UploadSink"]


class UploadSink(Sink):
    """Base class of sinks that upload to a service; a subclass implements `send`, `complete`, `give_up` and `remove`.

    Args:
        name: Name of the object in its store.
        place: URI of the object in the service, for messages.
    """

    def __init__(self, name: str, place: str) -> None:
        self.place = place
        self.may_exist = False
        """Whether the object may exist in the service, so that `abort` must remove it."""
        self._name = name
        self._position = 0
        self._ended = False

    @property
    def name(self) -> str:
        """Name of the object in its store."""
        return self._name

    def tell(self) -> int:
        """Return the number of bytes accepted so far."""
        return self._position

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send the buffers, which the caller may change after the call."""
        if self._ended:
            raise ValueError(f"{self.place} has been closed")
        for buffer in buffers:
            self.send(memoryview(buffer))
            self._position += len(buffer)

    def write_stable(self, buffer: bytes | bytearray | memoryview) -> None:
        """Send a buffer, which the caller does not change before the upload has ended."""
        if self._ended:
            raise ValueError(f"{self.place} has been closed")
        self.send_stable(memoryview(buffer))
        self._position += len(buffer)

    def close(self, *, sync: bool) -> None:
        """Complete the upload. `sync` has no effect: the service determines how durable an acknowledged upload is."""
        del sync
        if not self._ended:
            self._ended = True
            self.complete()

    def abort(self) -> None:
        """Abort the upload, and remove the object if it is visible."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(Exception):
                self.give_up()
        if self.may_exist:
            self.may_exist = False
            with contextlib.suppress(Exception):
                self.remove()

    @abstractmethod
    def send(self, view: memoryview) -> None:
        """Send the next bytes of the object. The caller may change `view` after the call."""

    def send_stable(self, view: memoryview) -> None:
        """Send the next bytes of the object. The caller does not change `view` before the upload has ended."""
        self.send(view)

    @abstractmethod
    def complete(self) -> None:
        """Complete the upload: make the object from all bytes sent. Called at most once, and not after `give_up`."""

    @abstractmethod
    def give_up(self) -> None:
        """Cancel the upload, if the service can, and release its resources. `abort` ignores errors."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the object from the service. `abort` ignores errors."""
