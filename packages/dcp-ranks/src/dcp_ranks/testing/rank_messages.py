"""Messages between a `RankPool` and its rank processes. Imports no torch."""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "Done", "Gone", "Join", "Raised", "read_message", "send_message"]

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Join:
    """Join a new default process group after leaving the old one; with `backend` None, only leave.

    `port` is None for the rank that hosts the store; it replies twice: with the port, and after joining.
    """

    rank: int
    world_size: int
    backend: str | None
    port: int | None
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """Call a pickled pair (function, arguments), with pickled warning filters.

    `modules` maps modules that the rank cannot import by name to their files.
    """

    function: bytes
    filters: bytes
    sys_path: tuple[str, ...]
    modules: dict[str, str]


@dataclass(frozen=True, slots=True)
class Done:
    """Reply with the pickled return value."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """Reply of a failed request: traceback, and pickled exception or None."""

    text: str
    exception: bytes | None


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank process ended without replying."""

    text: str


def send_message(connection: socket.socket, message: object) -> None:
    """Pickle and send a message."""
    data = pickle.dumps(message, protocol=5)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def read_message(connection: socket.socket) -> Any:
    """Receive and unpickle one message. Raises EOFError if the connection was closed."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return pickle.loads(_read(connection, length))


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        try:
            part = connection.recv(min(length - len(data), 1 << 20))
        except ConnectionError as error:
            raise EOFError from error
        if not part:
            raise EOFError
        data += part
    return bytes(data)
