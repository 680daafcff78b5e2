"""Messages between a `RankPool` and its rank processes, and their transport over a socket. Imports no torch."""

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
    """Request to leave the current default process group and to join a new one; with `backend` None, only to leave.

    `port` is None for the rank that hosts the group's store; that rank replies twice: with the port, and when it has
    joined.
    """

    rank: int
    world_size: int
    backend: str | None
    port: int | None
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """Request to call a function in a rank process.

    `function` is the pickled pair (function, arguments), `filters` the caller's pickled warning filters. `sys_path` is
    the caller's `sys.path`. `modules` maps names of modules to their files, for modules that the rank process cannot
    import by name.
    """

    function: bytes
    filters: bytes
    sys_path: tuple[str, ...]
    modules: dict[str, str]


@dataclass(frozen=True, slots=True)
class Done:
    """Reply of a rank process whose `Call` or `Join` succeeded; `result` is the pickled return value."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """Reply of a rank process whose `Call` or `Join` raised: traceback, and pickled exception (None if that fails)."""

    text: str
    exception: bytes | None


@dataclass(frozen=True, slots=True)
class Gone:
    """Record that a rank process ended without replying; the pool uses it in place of a reply. Never sent."""

    text: str


def send_message(connection: socket.socket, message: object) -> None:
    """Pickle a message, and send all of it over a socket."""
    data = pickle.dumps(message, protocol=5)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def read_message(connection: socket.socket) -> Any:
    """Receive one complete message from a socket, and unpickle it.

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
