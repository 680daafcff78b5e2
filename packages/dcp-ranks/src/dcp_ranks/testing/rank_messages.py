"""Messages between the pool and its rank processes, and their transport over a socket. Imports no torch."""

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
    """Request to leave the present default process group and to join a new one; if `backend` is None, to join none.

    `port` is None for the rank that hosts the group's store. It replies twice: with the port, and when it has joined.
    """

    rank: int
    world_size: int
    backend: str | None
    port: int | None
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """Request: call a pickled `(function, arguments)`, under the caller's warning filters.

    `modules` lists the files of modules that a rank process might not find by itself.
    """

    function: bytes
    filters: bytes
    sys_path: tuple[str, ...]
    modules: dict[str, str]


@dataclass(frozen=True, slots=True)
class Done:
    """Reply: a call or a join succeeded; `result` is pickled."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """Reply: a call or a join raised; the exception is pickled, or None if it cannot be pickled."""

    text: str
    exception: bytes | None


@dataclass(frozen=True, slots=True)
class Gone:
    """A process ended without a reply. Never sent: the pool records this in place of a reply."""

    text: str


def send_message(connection: socket.socket, message: object) -> None:
    """Send one complete message."""
    data = pickle.dumps(message, protocol=5)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def read_message(connection: socket.socket) -> Any:
    """Receive one complete message.

    Raises:
        EOFError: The peer has closed its connection.
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
