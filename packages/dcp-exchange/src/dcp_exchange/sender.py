"""`Sender`: sends pieces to a rank of another host, in a thread of its own: a slow connection must not stop others."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from dcp_ranks import Stream

__all__ = ["Sender"]


class Sender(threading.Thread):
    """Thread that sends pieces over one stream, in order.

    Args:
        stream: The stream.
        on_error: Function that is called with the error that ends the thread, such as a lost stream.
    """

    def __init__(self, stream: Stream, on_error: Callable[[Exception], None]) -> None:
        super().__init__(name=f"dcp-exchange-to-{stream.rank}", daemon=True)
        self._stream = stream
        self._on_error = on_error
        self._queue: queue.SimpleQueue[tuple[bytes, memoryview, Callable[[], None]] | None] = queue.SimpleQueue()
        self._ended = False

    def send(self, message: bytes, payload: memoryview, done: Callable[[], None]) -> None:
        """Send a message with a payload later, and call `done` when the payload is not needed any more."""
        self._queue.put((message, payload, done))

    def end(self, *, abort: bool) -> None:
        """End the thread after the piece that it is sending.

        Args:
            abort: Whether to break off, as the other rank may take no more bytes.
        """
        self._ended = True
        if abort:
            self._stream.lose("the exchange has failed")
        self._queue.put(None)

    def run(self) -> None:
        """Send until `end`."""
        while (task := self._queue.get()) is not None and not self._ended:
            message, payload, done = task
            try:
                self._stream.send(message, [payload])
                done()
            except Exception as error:  # noqa: BLE001 - `on_error` reports it
                self._on_error(error)
                return
