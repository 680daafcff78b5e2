"""`Dispatcher`: receives from all of this rank's streams in one thread."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final

from dcp_ranks.errors import OperationError
from dcp_ranks.streams.reception import Reception, StreamHandler
from dcp_ranks.streams.stream import Stream

if TYPE_CHECKING:
    from typing_extensions import Self

_POLL_SECONDS: Final = 0.05
_CUT_OFF: Final = "its connection ended while this rank did not receive from it: its process has ended, or has given up"


class Dispatcher:
    """Receiver of all streams of one rank; `Streams.dispatch` returns it.

    As a context manager it starts a thread; `run` uses the caller's thread. It detects a killed rank immediately. A
    suspended or busy rank looks idle: only the caller's deadline detects it.

    Example:
        ```python
        from dcp_ranks import Streams

        class Receiver:
            def on_message(self, stream, message, payload_bytes, descriptor):
                return memoryview(bytearray(payload_bytes)) if payload_bytes else None

            def on_payload(self, stream, message, buffer):
                print(f"rank {stream.rank}: {message!r}, {len(buffer)} bytes")

            def on_goodbye(self, stream): ...
            def on_lost(self, stream, reason): ...

        with Streams(0, b"secret of the job") as streams, streams.dispatch(Receiver()):
            pass  # connect, send
        ```
    """

    def __init__(self, handler: StreamHandler) -> None:
        self._handler = handler
        self._poller = select.epoll()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._waker, select.EPOLLIN)
        self._receptions: dict[int, Reception] = {}
        self._lock = threading.RLock()
        self._resumed: deque[Stream] = deque()
        self._running = threading.Lock()
        self._runner: int | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._closed = False
        self.error: BaseException | None = None
        """Handler's exception that has ended the own thread."""

    def add(self, stream: Stream) -> None:
        """Receive from this stream, too."""
        with self._lock:
            if self._closed:
                return
            descriptor = stream.connection.fileno()
            self._receptions[descriptor] = Reception(stream, self._handler)
            self._poller.register(descriptor, select.EPOLLIN)
            stream.watch = lambda: self._set_events(descriptor)
            self._set_events(descriptor)

    def resume(self, stream: Stream) -> None:
        """Receive again after a handler returned `NOT_NOW`. Thread-safe."""
        self._resumed.append(stream)
        self.wake()

    def wake(self) -> None:
        """Make `run` call its `stop` soon. Thread-safe."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._waker, 1)

    def run(self, stop: Callable[[], bool]) -> None:
        """Receive, and call the handler, until `stop` returns true; raise exceptions of the handler.

        `stop` is called after each round of handlers, after `wake`, and 20 times per second.

        Raises:
            OperationError: The dispatcher is closed, or runs in another thread.
        """
        if self._closed or not self._running.acquire(blocking=False):
            raise OperationError("the dispatcher of these streams is closed, or runs in another thread already")
        try:
            self._runner = threading.get_ident()
            while not (self._stopping or stop()):
                self._turn(_POLL_SECONDS)
        finally:
            self._runner = None
            self._running.release()

    def start(self) -> None:
        """Run in a new thread until `close`."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="dcp-streams", daemon=True)
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Stop receiving and end `run`, in any thread; later calls do nothing.

        Raises:
            BaseException: A handler raised it in the dispatcher's own thread.
            OperationError: A handler calls this.
        """
        self.check_caller()
        self._stopping = True
        self.wake()
        if self._thread is not None:
            self._thread.join()
        with self._running:  # `run` in the thread of a caller has ended
            self.drop()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def check_caller(self) -> None:
        """Raise OperationError in a handler."""
        if self._runner == threading.get_ident():
            raise OperationError("a handler cannot close its own dispatcher: make `stop` true, or close it elsewhere")

    def drop(self) -> None:
        """Close the dispatcher's descriptors, not the streams'; also for a forked child."""
        if not self._closed:
            self._closed = True
            for reception in self._receptions.values():
                reception.close()
            self._receptions.clear()
            self._poller.close()
            os.close(self._waker)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with contextlib.suppress(BaseException):  # the first error is the one to know
                self.close()

    def _work(self) -> None:
        try:
            self.run(lambda: False)
        except BaseException as error:  # noqa: BLE001 - `close` raises it in the thread of the caller
            self.error = error
            self._lose_all(f"this rank can no longer receive: {type(error).__name__}: {error}")

    def _lose_all(self, reason: str) -> None:
        """End all streams, since both sides would wait for messages that no side receives."""
        for reception in [*self._receptions.values()]:
            reception.stream.lose(reason)
            with contextlib.suppress(Exception):  # the handler may have raised before
                self._handler.on_lost(reception.stream, reason)

    def _turn(self, seconds: float) -> None:
        for descriptor, events in self._poller.poll(seconds):
            if descriptor == self._waker:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._waker)
                self._resume()
            elif (reception := self._receptions.get(descriptor)) is not None:
                self._attend(descriptor, reception, events)

    def _resume(self) -> None:
        while self._resumed:
            stream = self._resumed.popleft()
            for descriptor, reception in list(self._receptions.items()):
                if reception.stream is stream:
                    reception.resume()
                    self._settle(descriptor, reception)

    def _attend(self, descriptor: int, reception: Reception, events: int) -> None:
        if events & select.EPOLLOUT:
            reception.stream.flush()
        if reception.is_paused:
            if events & (select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP):
                reception.end = reception.stream.lost or _CUT_OFF
        elif events & ~select.EPOLLOUT:
            reception.receive()
        self._settle(descriptor, reception)

    def _settle(self, descriptor: int, reception: Reception) -> None:
        if reception.end is None:
            self._set_events(descriptor)
            return
        with self._lock:
            self._poller.unregister(descriptor)
            del self._receptions[descriptor]
        reception.close()
        if reception.end:
            reception.stream.lose(reception.end)
            self._handler.on_lost(reception.stream, reception.end)

    def _set_events(self, descriptor: int) -> None:
        with self._lock:
            reception = self._receptions.get(descriptor)
            if reception is not None and not self._closed:
                events = select.EPOLLRDHUP if reception.is_paused else select.EPOLLIN
                self._poller.modify(descriptor, events | (select.EPOLLOUT if reception.stream.is_stuck else 0))
