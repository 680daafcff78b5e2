"""What the pool and its rank processes say to each other, and how it crosses their socket. Imports no torch."""

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
    """Become a rank of a new default process group; `backend` None means none.

    `port` is None for the rank that hosts the store, and replies twice: first with the port.
    """

    rank: int
    world_size: int
    backend: str | None
    port: int | None
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """Call a pickled `(function, arguments)`, under the caller's warning filters.

    `modules` says in which files the caller found modules that a rank process may not find by itself.
    """

    function: bytes
    filters: bytes
    sys_path: tuple[str, ...]
    modules: dict[str, str]


@dataclass(frozen=True, slots=True)
class Done:
    """A call or a join went well; `result` is pickled."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """A call or a join raised; the exception is pickled, or None where that is not possible."""

    text: str
    exception: bytes | None


@dataclass(frozen=True, slots=True)
class Gone:
    """A process ended without a reply. Not sent: what the pool notes down instead."""

    text: str


def send_message(connection: socket.socket, message: object) -> None:
    """Send one message whole."""
    data = pickle.dumps(message, protocol=5)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def read_message(connection: socket.socket) -> Any:
    """Receive one message whole.

    Raises:
        EOFError: The other side has ended.
    """
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
