"""`Stream`: one authenticated connection to another rank, which sends frames of head, message and payload."""

from __future__ import annotations

import array
import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from dcp_ranks.errors import StreamError
from dcp_ranks.streams.greetings import is_local
from dcp_ranks.transport.store_wire import keep_lease

HEAD: Final = struct.Struct("<BBIQ")
"""Kind of frame, number of descriptors (0 or 1), size of message and of payload in bytes."""

MESSAGE: Final = 1
GOODBYE: Final = 2
MAX_MESSAGE_BYTES: Final = 64 << 10

_VIEWS_AT_ONCE: Final = 512
_MOST_POSTED_BYTES: Final = 4 << 20
_LOCAL_BUFFER_BYTES: Final = 4 << 20
_DRAINED_BYTES: Final = 64 << 10

_NOT_READ: Final = "it took no bytes for {:.0f} s: it is stopped, or does not receive"
_HAS_LEFT: Final = "it has said goodbye, and takes no more messages"
_SAID_GOODBYE: Final = "this rank has said goodbye, and sends no more messages"


class Stream:
    """Authenticated connection to another rank of the operation, from `Streams.connect`; a `Dispatcher` receives.

    All methods are thread-safe. One thread's messages arrive in order, each exactly once, unless the stream is lost.
    Data is not encrypted.

    Attributes:
        rank: Rank at the other end.
        address: Address of the other end, as text.
        same_host: Whether both ranks have proved that they share a host, by reading memory through the other's
            descriptor. Equal on both ends.

    Example:
        ```python
        from concurrent.futures import ThreadPoolExecutor
        from dcp_ranks import Streams

        with Streams(0, b"secret") as first, Streams(1, b"secret") as second:  # in practice in two processes
            for each in (first, second):
                each.meet([first.card, second.card])
            with ThreadPoolExecutor() as pool:
                pool.submit(second.connect, 0, 10)
                stream = first.connect(1, 10)
            stream.send(b"weights", [memoryview(bytes(1000))])
            assert stream.same_host
        ```
    """

    def __init__(
        self, connection: socket.socket, rank: int, address: str, *, timeout_seconds: float, peer_timeout_seconds: float
    ) -> None:
        self.rank = rank
        self.address = address
        self.same_host = is_local(connection)
        self.connection = connection
        self._timeout_seconds = timeout_seconds
        self._writing = threading.Lock()
        self._posted: deque[list[memoryview]] = deque()
        self._posted_bytes = 0
        self._counting = threading.Lock()
        self.lost: str | None = None
        """Why the stream is lost, such as "its process has ended"; None while it works."""
        self._said_goodbye = False
        self.has_left = False
        self.is_stuck = False
        """Whether posted messages wait for the connection."""
        self.watch: Callable[[], None] = lambda: None
        """Function to call when `is_stuck` may have changed."""
        connection.setblocking(True)
        seconds = max(timeout_seconds, 0.001)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if self.same_host:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
        else:
            keep_lease(connection, peer_timeout_seconds)

    def send(self, message: bytes, payload: Sequence[memoryview] = (), descriptor: int | None = None) -> None:
        """Send a message with a payload from the given memory and a descriptor; wait until the connection took it.

        Afterwards the memory may be changed. Handlers of a dispatcher must use `post`, since two of them could wait for
        each other.

        Args:
            message: At most 64 KiB.
            payload: Contiguous buffers, which arrive as one payload; any size.
            descriptor: File descriptor to pass on, which stays open here; only with `same_host`.

        Raises:
            StreamError: The other rank is lost, has said goodbye, or takes no bytes for the streams' timeout; the
                stream is then lost.
            ValueError: The message is too long, or a descriptor cannot be passed to another host.
        """
        if descriptor is not None and not self.same_host:
            raise ValueError(
                f"a descriptor cannot be passed to rank {self.rank}, which has not proved to be of this host: send the "
                "bytes as a payload (Stream.same_host says which ranks can)"
            )
        views = _byte_views(payload)
        size = sum(map(len, views))
        views.insert(0, memoryview(_write_head(MESSAGE, message, size, descriptor=descriptor is not None)))
        with self._writing:
            self._check_open()
            self._write_posted(block=True)
            self._write(views, descriptor, block=True)
        self.flush()

    def post(self, message: bytes) -> None:
        """Send a message of at most 64 KiB without waiting; the dispatcher sends the rest later. For handlers.

        Raises:
            StreamError: The other rank is lost or has said goodbye, or more than 4 MiB of messages are queued.
            ValueError: The message is too long.
        """
        data = _write_head(MESSAGE, message, 0, descriptor=False)
        self._check_open()
        if self._posted_bytes + len(data) > _MOST_POSTED_BYTES:
            raise self._error(f"more than {_MOST_POSTED_BYTES >> 20} MiB of messages wait for it: it does not receive")
        self._queue(data)

    def goodbye(self) -> None:
        """Announce, without waiting, that this rank sends no more messages; later calls do nothing.

        The other dispatcher calls `on_goodbye`, and the end of the connection is not a loss.
        """
        if not self._said_goodbye and self.lost is None:
            self._said_goodbye = True
            self._queue(_write_head(GOODBYE, b"", 0, descriptor=False))

    def flush(self) -> None:
        """Send as many posted messages as possible without blocking."""
        while self._posted and self.lost is None and self._writing.acquire(blocking=False):
            try:
                sent = self._write_posted(block=False)
            except StreamError:
                return  # the dispatcher notices, as will the next call of `send`
            finally:
                self._writing.release()
            if not sent:
                return

    def lose(self, reason: str) -> None:
        """Mark the stream as lost; its sending and receiving threads notice."""
        if self.lost is None:
            self.lost = reason
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Sent data is still delivered; a sending thread gets an error first."""
        if self.lost is None:
            self.lost = "this rank has closed it"
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
        with self._writing:
            with contextlib.suppress(OSError):  # unread bytes would make TCP discard data that waits to be sent
                while self.connection.recv(_DRAINED_BYTES, socket.MSG_DONTWAIT):
                    pass
            self.connection.close()

    def __repr__(self) -> str:
        state = f", lost: {self.lost}" if self.lost else ""
        return f"<Stream to rank {self.rank} at {self.address}{state}>"

    def _queue(self, data: bytes) -> None:
        self._count(len(data))
        self._posted.append([memoryview(data)])
        self.flush()

    def _count(self, added_bytes: int) -> None:
        with self._counting:
            self._posted_bytes += added_bytes

    def _check_open(self) -> None:
        for state, reason in (
            (self.lost, self.lost),
            (self.has_left, _HAS_LEFT),
            (self._said_goodbye, _SAID_GOODBYE),
        ):
            if state:
                raise self._error(str(reason))

    def _error(self, reason: str) -> StreamError:
        return StreamError(self.rank, self.address, reason)

    def _write_posted(self, *, block: bool) -> bool:
        while self._posted:
            views = self._posted[0]
            size = sum(map(len, views))
            sent = self._write(views, None, block=block)
            self._count(sum(map(len, views)) - size)
            if not sent:
                self.is_stuck = True
                self.watch()
                return False
            self._posted.popleft()
        self.is_stuck = False
        return True

    def _write(self, views: list[memoryview], descriptor: int | None, *, block: bool) -> bool:
        ancillary = []
        if descriptor is not None:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        flags = socket.MSG_NOSIGNAL | (0 if block else socket.MSG_DONTWAIT)
        try:
            while views:
                _advance(views, self.connection.sendmsg(views[:_VIEWS_AT_ONCE], ancillary, flags))
                ancillary = []
        except BlockingIOError as error:
            if not block:
                return False
            self.lose(_NOT_READ.format(self._timeout_seconds))
            raise self._error(str(self.lost)) from error
        except OSError as error:
            self.lose(_HAS_LEFT if self.has_left else f"its connection broke: {error.strerror or error}")
            raise self._error(str(self.lost)) from error
        except BaseException:
            self.lose("this rank was interrupted while it sent")
            raise
        return True


def _write_head(kind: int, message: bytes, payload_bytes: int, *, descriptor: bool) -> bytes:
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"the message has {len(message)} bytes; a message has at most {MAX_MESSAGE_BYTES}: send more as its payload"
        )
    return HEAD.pack(kind, descriptor, len(message), payload_bytes) + message


def _byte_views(buffers: Sequence[memoryview]) -> list[memoryview]:
    return [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]


def _advance(views: list[memoryview], sent_bytes: int) -> None:
    done = 0
    for view in views:
        if len(view) > sent_bytes:
            break
        sent_bytes -= len(view)
        done += 1
    del views[:done]
    if sent_bytes:
        views[0] = views[0][sent_bytes:]
