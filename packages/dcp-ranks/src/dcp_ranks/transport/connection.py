"""One TCP connection between two ranks: non-blocking exchange of frames, with TCP keepalive by the kernel.

The kernel answers the keepalive probes of the other host even if the process is busy, and closes the connection when
the process ends or the other host does not answer; so no thread has to send heartbeats. Not in this module: which
ranks connect, and why.

Source: Linux `tcp(7)`: TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT, TCP_USER_TIMEOUT.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Frame", "Link", "keep_lease", "listen", "own_addresses"]

_HEAD = struct.Struct("<BQIIQ")
_MAX_BODY_BYTES = 1 << 40
_MAX_STRANGE_BYTES = 256
_READ_BYTES = 8 << 20  # of one link at a time, lest the others wait
_PROBES = 4
_MOST_SECONDS = 32767  # Linux takes no more for a keep-alive timer


@dataclass(frozen=True, slots=True)
class Frame:
    """One message between ranks.

    Attributes:
        kind: Number of the kind of message, as the sending module defines it.
        sequence: Sequence number of the operation.
        step: Number of the phase within the operation.
        rank: Rank that the message is about, not always the sender.
        body: Contents of the message.
    """

    kind: int
    sequence: int
    step: int
    rank: int
    body: bytes | bytearray


class Link:
    """A TCP connection to another rank, established or being established. Not thread-safe; no method blocks.

    Args:
        connection: Socket; the link closes it.
        peer_timeout_seconds: Time in seconds without an answer of the other host after which the connection is broken.
    """

    def __init__(self, connection: socket.socket, peer_timeout_seconds: float) -> None:
        self._socket = connection
        self._out: deque[memoryview] = deque()
        self._head = bytearray()
        self._body: bytearray | None = None
        self._filled = 0
        self.reached = False
        """Whether the TCP connection has been established."""
        self.broken: str | None = None
        """Reason why the connection cannot send or receive any more; None while it works."""
        self.rank: int | None = None
        """Rank at the other end; None before authentication, when only small messages are accepted."""
        connection.setblocking(False)
        keep_lease(connection, peer_timeout_seconds)

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    @property
    def sending(self) -> bool:
        """Whether there are frames that have not been sent completely."""
        return bool(self._out)

    def send(self, frame: Frame) -> None:
        """Send as much of a frame as possible without blocking, and queue the rest for `flush`."""
        self._out.append(memoryview(_HEAD.pack(frame.kind, frame.sequence, frame.step, frame.rank, len(frame.body))))
        self._out.append(memoryview(frame.body))
        self.flush()

    def flush(self) -> None:
        """Send as much of the queued frames as possible without blocking."""
        while self._out and self.broken is None:
            try:
                sent = self._socket.send(self._out[0])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._break(error)
                return
            self.reached = True
            if sent < len(self._out[0]):
                self._out[0] = self._out[0][sent:]
            else:
                self._out.popleft()

    def receive(self) -> Iterator[Frame]:
        """Yield the frames that have arrived completely; sets `broken` if the other rank has closed the connection."""
        taken = 0
        while taken < _READ_BYTES and self.broken is None:
            try:
                count = self._read()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._break(error)
                return
            if not count:
                self.broken = "its connection was closed"
                return
            taken += count
            frame = self._whole()
            if frame is not None:
                yield frame

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self.broken = self.broken or "closed"

    def _read(self) -> int:
        if self._body is not None:
            count = self._socket.recv_into(memoryview(self._body)[self._filled :])
            self._filled += count
            return count
        data = self._socket.recv(_HEAD.size - len(self._head))
        self._head += data
        return len(data)

    def _whole(self) -> Frame | None:
        if len(self._head) < _HEAD.size:
            return None
        kind, sequence, step, rank, length = _HEAD.unpack(self._head)
        if self._body is None:
            if length > (_MAX_STRANGE_BYTES if self.rank is None else _MAX_BODY_BYTES):
                self.broken = "it sent an invalid frame"
                return None
            self._body, self._filled = bytearray(length), 0
        if self._filled < length:
            return None
        frame = Frame(kind, sequence, step, rank, self._body)
        self._head, self._body = bytearray(), None
        return frame

    def _break(self, error: OSError) -> None:
        self.broken = f"its connection broke: {error.strerror or error}"
        self._out.clear()


def keep_lease(connection: socket.socket, peer_timeout_seconds: float) -> None:
    """Set TCP options by which the kernel ends a connection whose other host has not answered for this many seconds.

    This works both while data is being sent and while the connection is idle.
    """
    wait_seconds = max(1, round(peer_timeout_seconds / (_PROBES + 2)))
    idle_seconds = max(1, round(peer_timeout_seconds) - _PROBES * wait_seconds)
    options = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": min(idle_seconds, _MOST_SECONDS),
        "TCP_KEEPINTVL": min(wait_seconds, _MOST_SECONDS),
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": round(peer_timeout_seconds * 1000),
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has every option
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Return a non-blocking listening TCP socket on one address of this host.

    Args:
        address: IPv4 or IPv6 address; connections to other addresses of the host are not accepted.
        port: Port number; 0 for any free port.

    Raises:
        OSError: The address is not one of this host, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.create_server((address, port), family=family, backlog=4096, reuse_port=False)
    made.setblocking(False)
    return made


def own_addresses() -> list[str]:
    """Return the IP addresses of this host, loopback last. Makes no name look-up, which is slow on some hosts."""
    return [*_own_v4(), *_own_v6(), "127.0.0.1"]


def _own_v4() -> list[str]:
    """Return the IPv4 addresses in `/proc/net/fib_trie`, where a line after each marks the local ones."""
    found: dict[str, None] = {}
    last = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/fib_trie").read_text().splitlines():
            if "|--" in line:
                last = line.split()[-1]
            elif "/32 host LOCAL" in line and not last.startswith("127."):
                found[last] = None
    return list(found)


def _own_v6() -> list[str]:
    """Return the IPv6 addresses in `/proc/net/if_inet6`: address, index, prefix length, scope, flags, name."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, *_ = line.split()
            if scope == "00":
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
