"""First bytes of both ends of a connection between two ranks: they authenticate each other, and prove one host.

The connecting rank sends a greeting, and the listening rank an answer; over a Unix socket each comes with a memory file
that holds the same bytes (see `host_proof`). Not in this module: when and where ranks connect.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from typing import Final

from dcp_ranks.streams.host_proof import holds, lend
from dcp_ranks.transport.handshake import Listener

__all__ = [
    "ANSWER_BYTES",
    "NO_MEMORY",
    "REFUSAL",
    "FirstBytes",
    "Guest",
    "descriptors_in",
    "is_local",
    "send_proof",
    "write_greeting",
]

_MAGIC: Final = b"dcpstrm1"
_GREETING: Final = struct.Struct("<8sI64s")
_ONE: Final = struct.calcsize("i")

ANSWER_BYTES: Final = 32
REFUSAL: Final = bytes(ANSWER_BYTES)
"""Answer to a greeting that is not authentic."""
NO_MEMORY: Final = bytes(range(ANSWER_BYTES))
"""Answer to an authentic greeting over a Unix socket that came without the memory file."""


def is_local(connection: socket.socket) -> bool:
    """Return whether a socket is a Unix socket, over which descriptors can be passed."""
    return connection.family == socket.AF_UNIX


def write_greeting(rank: int, hello: bytes) -> bytes:
    """Return the first bytes of the connecting rank: its rank, and the `hello` of the handshake."""
    return _GREETING.pack(_MAGIC, rank, hello)


def send_proof(connection: socket.socket, data: bytes) -> None:
    """Send a greeting or an answer; over a Unix socket with a memory file that holds the same bytes.

    Raises:
        OSError: The connection does not take the bytes, or no memory file can be made.
    """
    if not is_local(connection):
        connection.sendall(data)
        return
    with lend(data) as descriptor:
        socket.send_fds(connection, [data], [descriptor])


class FirstBytes:
    """The first bytes that arrive over a connection, a greeting or an answer, and the descriptors that come with them.

    Args:
        connection: Socket in non-blocking mode, which this object does not close.
        size: Number of bytes to receive.
    """

    def __init__(self, connection: socket.socket, size: int) -> None:
        self._connection = connection
        self._size = size
        self._data = b""
        self._descriptors: list[int] = []

    def receive(self) -> bytes | None:
        """Receive what has arrived; returns all bytes once they are complete, and None before.

        Raises:
            OSError: The connection is closed or broken.
        """
        missing = self._size - len(self._data)
        try:
            if is_local(self._connection):
                room = socket.CMSG_SPACE(_ONE)
                data, ancillary, _, _ = self._connection.recvmsg(missing, room, socket.MSG_CMSG_CLOEXEC)
                self._descriptors += descriptors_in(ancillary)
            else:
                data = self._connection.recv(missing)
        except (BlockingIOError, InterruptedError):
            return None
        if not data:
            raise ConnectionResetError("it closed the connection")
        self._data += data
        return self._data if len(self._data) == self._size else None

    def prove_host(self) -> bool:
        """Return whether the bytes came with one memory file that holds the same; only for authenticated ones."""
        proved = len(self._descriptors) == 1 and holds(self._descriptors[0], self._data)
        self.close()
        return proved

    def close(self) -> None:
        """Close the descriptors that came with the bytes."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class Guest:
    """An incoming connection that is not yet authenticated; no method blocks.

    Args:
        connection: Accepted socket, which the guest closes unless it is taken over.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._greeting = FirstBytes(connection, _GREETING.size)

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self.connection.fileno()

    def greet(self, listener: Listener) -> int | None:
        """Receive the greeting, and answer it; returns the authenticated rank, or None if more bytes must arrive.

        Raises:
            OSError: The connection was closed, or has not proved that it belongs to this job; the text says which.
        """
        data = self._greeting.receive()
        if data is None:
            return None
        magic, rank, hello = _GREETING.unpack(data)
        if magic != _MAGIC:
            raise ConnectionError("it sent no greeting")
        answer = listener.answer(hello, rank)
        if answer is None:
            self._refuse(REFUSAL)
            raise ConnectionError(f"it said that it is rank {rank}, but does not know the secret of this job")
        if is_local(self.connection) and not self._greeting.prove_host():
            self._refuse(NO_MEMORY)
            raise ConnectionError(f"rank {rank} connected to the Unix socket, but shares no memory with this rank")
        send_proof(self.connection, answer)
        return int(rank)

    def _refuse(self, answer: bytes) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(answer)

    def close(self) -> None:
        """Close the socket, and all descriptors that came over it."""
        self._greeting.close()
        self.connection.close()


def descriptors_in(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """Return the file descriptors in the ancillary data of a received message; the caller must close them."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(data) // _ONE
            found += struct.unpack(f"{count}i", data[: count * _ONE])
    return found
