"""First bytes on a connection: two ranks authenticate each other, and prove that they share a host.

Over a Unix socket, greeting and answer come with a memory file of the same bytes: a socket can be forwarded, and boot
ids can be equal on different hosts, but a descriptor can only be passed within one kernel.

Source: Linux `memfd_create(2)`, `unix(7)` (SCM_RIGHTS).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dcp_ranks.transport.listening import Listener

_MAGIC: Final = b"dcpstrm1"
_GREETING: Final = struct.Struct("<8sI64s")
_ONE: Final = struct.calcsize("i")

ANSWER_BYTES: Final = 32
REFUSAL: Final = bytes(ANSWER_BYTES)
"""Answer to a greeting that is not authentic."""
NO_MEMORY: Final = bytes(range(ANSWER_BYTES))
"""Answer to an authentic greeting without its memory file."""


def is_local(connection: socket.socket) -> bool:
    """Return whether this is a Unix socket, which can pass descriptors."""
    return connection.family == socket.AF_UNIX


def write_greeting(rank: int, hello: bytes) -> bytes:
    """Return the connecting rank's first bytes."""
    return _GREETING.pack(_MAGIC, rank, hello)


def send_proof(connection: socket.socket, data: bytes) -> None:
    """Send a greeting or answer, over a Unix socket with its memory file. Raises OSError."""
    if not is_local(connection):
        connection.sendall(data)
        return
    with lend(data) as descriptor:
        socket.send_fds(connection, [data], [descriptor])


class FirstBytes:
    """A greeting or answer that arrives over a non-blocking socket."""

    def __init__(self, connection: socket.socket, size: int) -> None:
        self._connection = connection
        self._size = size
        self._data = b""
        self._descriptors: list[int] = []

    def receive(self) -> bytes | None:
        """Return all bytes, or None before they are complete. Raises OSError."""
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
        """Return whether a memory file with the same bytes came along; only for authenticated bytes."""
        proved = len(self._descriptors) == 1 and holds(self._descriptors[0], self._data)
        self.close()
        return proved

    def close(self) -> None:
        """Close the received descriptors."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class Guest:
    """An unauthenticated accepted connection; no method blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._greeting = FirstBytes(connection, _GREETING.size)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self.connection.fileno()

    def greet(self, listener: Listener) -> int | None:
        """Answer the greeting; return the authenticated rank, or None if bytes are missing. Raises OSError."""
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
        """Close the socket and received descriptors."""
        self._greeting.close()
        self.connection.close()


def descriptors_in(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors in ancillary data; the caller must close them."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(data) // _ONE
            found += struct.unpack(f"{count}i", data[: count * _ONE])
    return found


@contextmanager
def lend(content: bytes) -> Iterator[int]:
    """Yield the descriptor of a memory file. Raises OSError."""
    descriptor = os.memfd_create("dcp-host-proof")
    try:
        os.write(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)


def holds(descriptor: int, content: bytes) -> bool:
    """Return whether an authenticated rank's memory file holds these bytes; other files might block."""
    try:
        return hmac.compare_digest(os.pread(descriptor, len(content) + 1, 0), content)
    except OSError:
        return False


_VALUE: Final = "DCP_JOB_SECRET"
_FILE: Final = "DCP_JOB_SECRET_FILE"
_LEAST_BYTES: Final = 16


def job_secret(default: bytes) -> bytes:
    """Return the secret of the job: the environment's if set, else `default`; the same on all ranks.

    `DCP_JOB_SECRET` holds the secret, `DCP_JOB_SECRET_FILE` the path of a file with it (a final line break is ignored).
    Readers of the process group's store know a `default` that was sent through it, but not the environment's secret.

    Raises:
        ValueError: Both variables are set, the file cannot be read, or the secret has fewer than 16 bytes.

    Example:
        ```python
        import os, secrets
        from dcp_ranks import job_secret

        drawn = secrets.token_bytes(32)
        assert job_secret(drawn) == drawn
        os.environ["DCP_JOB_SECRET"] = "6f1c0e0d9a4b4c6c"
        assert job_secret(drawn) == b"6f1c0e0d9a4b4c6c"
        del os.environ["DCP_JOB_SECRET"]
        ```
    """
    value, path = os.environ.get(_VALUE), os.environ.get(_FILE)
    if value is not None and path is not None:
        raise ValueError(f"{_VALUE} and {_FILE} are both set; unset one of them, the same on all ranks")
    if value is not None:
        return _checked(os.fsencode(value), _VALUE)
    if path is not None:
        return _checked(_content(path), f"the file {path} that {_FILE} names")
    return default


def _content(path: str) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"the secret of the job cannot be read: {path}: {error.strerror or error}; make the file that "
            f"{_FILE} names readable for this process, or unset the variable on all ranks"
        ) from error
    return data.removesuffix(b"\n").removesuffix(b"\r")


def _checked(secret: bytes, source: str) -> bytes:
    if len(secret) < _LEAST_BYTES:
        raise ValueError(
            f"{source} holds a secret of {len(secret)} bytes; at least {_LEAST_BYTES} are needed, of random ones: "
            "`openssl rand -hex 32` makes some"
        )
    return secret
