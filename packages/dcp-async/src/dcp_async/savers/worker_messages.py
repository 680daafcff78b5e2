"""Messages between trainer and worker, pickled: both belong to the same program and user. Imports no torch.

A file descriptor follows its message with one extra byte (SCM_RIGHTS).
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

_LENGTH = struct.Struct("<Q")
_PART_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of the trainer, with a `WorkerOptions`."""

    sys_path: tuple[str, ...]
    options: Any
    log_level: int


@dataclass(frozen=True, slots=True)
class NewArena:
    """Request to map a memory file as this arena."""

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class NewWaves:
    """Sent before a `Save` with waves, with a socket; the arguments of a `WaveFeed`."""

    piece_bytes: int
    digests: dict[int, int | None]


@dataclass(frozen=True, slots=True)
class NewGroup:
    """Settings for a process group, a `save_agreement.Seat`."""

    seat: Any


@dataclass(frozen=True, slots=True)
class NewStructure:
    """A `copy_state.Structure`, for later saves."""

    structure: Any


@dataclass(frozen=True, slots=True)
class Forget:
    """Request to drop a structure."""

    identifier: str


@dataclass(frozen=True, slots=True)
class ForgetArena:
    """Request to unmap an unused arena."""

    number: int


@dataclass(frozen=True, slots=True)
class Save:
    """Request to save; the answer repeats `number`."""

    number: int
    structure: str
    arena: int
    group: str
    ticket: Any
    checkpoint_id: Any
    use_collectives: bool
    objects: dict[int, Any] = field(default_factory=dict)
    """By position in the structure."""
    means: bytes | None = None
    """Pickled `(storage writer, planner, plan)`; None if unchanged for the structure."""
    surroundings: Any = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker is ready."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat of the worker process."""


@dataclass(frozen=True, slots=True)
class EventSent:
    """A `CheckpointEvent` for observers."""

    event: Any


@dataclass(frozen=True, slots=True)
class Logged:
    """Log record of the worker."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Warned:
    """Warning, with the pickled `category`."""

    category: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A save succeeded: a save id for the metadata, or the metadata."""

    number: int
    save_id: str | None
    metadata: bytes | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A save, or something before it (`number` 0), failed."""

    number: int
    failure: Any


def send_message(connection: socket.socket, message: object, descriptor: int | None = None) -> int:
    """Send a message and descriptor; return the number of bytes. Raises TimeoutError if the peer accepts nothing."""
    data = pickle.dumps(message, protocol=5)
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:  # the timeout is for each part: a long message is not silence
        left = left[connection.send(left[:_PART_BYTES]) :]
    if descriptor is not None:
        socket.send_fds(connection, [b"f"], [descriptor])
    return _LENGTH.size + len(data)


def read_message(connection: socket.socket) -> Any:
    """Receive one message; for a `NewArena` or `NewWaves`, message and file descriptor.

    Raises EOFError, TimeoutError, or UnpicklingError, whose `__cause__` has the error.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    data = _read(connection, length)
    try:
        message = pickle.loads(data)
    except Exception as error:
        raise pickle.UnpicklingError from error
    if not isinstance(message, NewArena | NewWaves):
        return message
    byte, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not byte or not descriptors:
        raise EOFError
    return message, descriptors[0]


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        try:
            part = connection.recv(min(length - len(data), _PART_BYTES))
        except ConnectionError as error:
            raise EOFError from error
        if not part:
            raise EOFError
        data += part
    return bytes(data)
