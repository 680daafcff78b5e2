"""`Stream`: one authenticated connection to another rank, with messages, payloads from memory, and descriptors.

Not in this module: receiving (see `dispatcher`), connecting.
"""

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
from dcp_ranks.streams.frames import GOODBYE, MESSAGE, advance, byte_views, write_head
from dcp_ranks.streams.greetings import is_local
from dcp_ranks.transport.connection import keep_lease

__all__ = ["Stream"]

_VIEWS_AT_ONCE: Final = 512
_MOST_POSTED_BYTES: Final = 4 << 20
_LOCAL_BUFFER_BYTES: Final = 4 << 20
_DRAINED_BYTES: Final = 64 << 10

_NOT_READ: Final = "it took no bytes for {:.0f} s: it is stopped, or does not receive"
_HAS_LEFT: Final = "it has said goodbye, and takes no more messages"
_SAID_GOODBYE: Final = "this rank has said goodbye, and sends no more messages"


class Stream:
    """Authenticated connection to another rank of the operation; `Streams.connect` makes it, `Dispatcher` receives.

    All methods are thread-safe. Messages of one thread arrive in their order, each exactly once, unless the stream is
    lost. What is sent is authenticated at the beginning of the connection, and not encrypted.

    Attributes:
        rank: Rank at the other end.
        address: Address of the other end, as text.
        same_host: Whether the other rank has proved that it is of this host: each has read memory through a descriptor
            from the other. True on both ends, or on none.

    Example:
        ```python
        from concurrent.futures import ThreadPoolExecutor
        from dcp_ranks import Streams

        with Streams(0, b"secret") as first, Streams(1, b"secret") as second:  # in earnest of two processes
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
        self._connection = connection
        self._timeout_seconds = timeout_seconds
        self._writing = threading.Lock()
        self._posted: deque[list[memoryview]] = deque()
        self._posted_bytes = 0
        self._counting = threading.Lock()
        self._lost: str | None = None
        self._said_goodbye = False
        self.has_left = False
        """Whether the other rank has said goodbye."""
        self.is_stuck = False
        """Whether posted messages wait until the connection takes more bytes."""
        self.watch: Callable[[], None] = lambda: None
        """Function of the dispatcher that is called when `is_stuck` may have changed."""
        connection.setblocking(True)
        seconds = max(timeout_seconds, 0.001)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if self.same_host:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
        else:
            keep_lease(connection, peer_timeout_seconds)

    @property
    def lost(self) -> str | None:
        """Why the stream is lost, such as "its process has ended"; None while it works."""
        return self._lost

    @property
    def connection(self) -> socket.socket:
        """The socket, for the dispatcher."""
        return self._connection

    def send(self, message: bytes, payload: Sequence[memoryview] = (), descriptor: int | None = None) -> None:
        """Send a message, with a payload straight from the given memory and a descriptor, and wait until it is taken.

        Blocks while the buffers of the connection are full. The memory may be changed when the call returns. Not for
        handlers of a dispatcher: two of them could wait for each other. They use `post`.

        Args:
            message: At most 64 KiB.
            payload: Contiguous buffers, which arrive as one payload; any size.
            descriptor: File descriptor to pass on, which stays open here; only to a rank with `same_host`.

        Raises:
            StreamError: The other rank is lost, has said goodbye, or takes no bytes for the timeout of the streams; the
                stream is lost then.
            ValueError: The message is too long, or a descriptor cannot be passed to another host.
        """
        if descriptor is not None and not self.same_host:
            raise ValueError(
                f"a descriptor cannot be passed to rank {self.rank}, which has not proved to be of this host: send the "
                "bytes as a payload (Stream.same_host says which ranks can)"
            )
        views = byte_views(payload)
        size = sum(map(len, views))
        views.insert(0, memoryview(write_head(MESSAGE, message, size, descriptor=descriptor is not None)))
        with self._writing:
            self._check_open()
            self._write_posted(block=True)
            self._write(views, descriptor, block=True)
        self.flush()

    def post(self, message: bytes) -> None:
        """Send a message without waiting: what the connection does not take now is sent later, by the dispatcher.

        For handlers of the dispatcher, and for small messages such as credits: they wait in memory, at most 4 MiB, for
        the payload that is being sent, and for a slow rank.

        Args:
            message: At most 64 KiB.

        Raises:
            StreamError: The other rank is lost or has said goodbye, or too many messages wait for it.
            ValueError: The message is too long.
        """
        data = write_head(MESSAGE, message, 0, descriptor=False)
        self._check_open()
        if self._posted_bytes + len(data) > _MOST_POSTED_BYTES:
            raise self._error(f"more than {_MOST_POSTED_BYTES >> 20} MiB of messages wait for it: it does not receive")
        self._queue(data)

    def goodbye(self) -> None:
        """Say that this rank sends no more messages, after those sent so far; later calls do nothing. Does not wait.

        The other rank's dispatcher then calls `on_goodbye`, and does not take the end of the connection for a death.
        """
        if not self._said_goodbye and self._lost is None:
            self._said_goodbye = True
            self._queue(write_head(GOODBYE, b"", 0, descriptor=False))

    def flush(self) -> None:
        """Send as many posted messages as possible without blocking."""
        while self._posted and self._lost is None and self._writing.acquire(blocking=False):
            try:
                sent = self._write_posted(block=False)
            except StreamError:
                return  # the dispatcher notices, as will the next call of `send`
            finally:
                self._writing.release()
            if not sent:
                return

    def lose(self, reason: str) -> None:
        """End the connection because it has failed, so that threads that send or receive over it notice."""
        if self._lost is None:
            self._lost = reason
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; a thread that is sending gets an error first, and what was sent is still delivered."""
        if self._lost is None:
            self._lost = "this rank has closed it"
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)
        with self._writing:
            with contextlib.suppress(OSError):  # bytes that nobody reads would make TCP forget what waits to be sent
                while self._connection.recv(_DRAINED_BYTES, socket.MSG_DONTWAIT):
                    pass
            self._connection.close()

    def __repr__(self) -> str:
        state = f", lost: {self._lost}" if self._lost else ""
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
            (self._lost, self._lost),
            (self.has_left, _HAS_LEFT),
            (self._said_goodbye, _SAID_GOODBYE),
        ):
            if state:
                raise self._error(str(reason))

    def _error(self, reason: str) -> StreamError:
        return StreamError(self.rank, self.address, reason)

    def _write_posted(self, *, block: bool) -> bool:
        """Write posted messages; returns False if the connection takes no more. The caller holds the lock."""
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
        """Write views, which are removed as far as they are sent; returns False if that would block."""
        ancillary = []
        if descriptor is not None:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        flags = socket.MSG_NOSIGNAL | (0 if block else socket.MSG_DONTWAIT)
        try:
            while views:
                advance(views, self._connection.sendmsg(views[:_VIEWS_AT_ONCE], ancillary, flags))
                ancillary = []
        except BlockingIOError as error:
            if not block:
                return False
            self.lose(_NOT_READ.format(self._timeout_seconds))
            raise self._error(str(self._lost)) from error
        except OSError as error:
            self.lose(_HAS_LEFT if self.has_left else f"its connection broke: {error.strerror or error}")
            raise self._error(str(self._lost)) from error
        except BaseException:
            self.lose("this rank was interrupted while it sent")
            raise
        return True
