"""Messages between the trainer and the worker process of a saver, and their transport over a socket. Imports no torch.

Messages are pickled, which is safe because both processes belong to the same program and user. A file descriptor is
sent with one extra byte after its message (SCM_RIGHTS).
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Beat",
    "EventSent",
    "Failed",
    "Forget",
    "ForgetArena",
    "Hello",
    "Logged",
    "NewArena",
    "NewGroup",
    "NewStructure",
    "NewWaves",
    "NotUnderstoodError",
    "Ready",
    "Save",
    "Saved",
    "Warned",
    "read_message",
    "send_message",
]


class NotUnderstoodError(Exception):
    """A message was received completely, but cannot be unpickled in this process; `__cause__` has the error."""


_LENGTH = struct.Struct("<Q")
_PART_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of the trainer, with the options of the worker, a `WorkerOptions`."""

    sys_path: tuple[str, ...]
    options: Any
    log_level: int


@dataclass(frozen=True, slots=True)
class NewArena:
    """Request to map a memory file as an arena, the shared memory that holds staged tensors.

    The file descriptor of the memory file is sent with this message. The arena replaces an earlier arena with the same
    number.
    """

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class NewWaves:
    """Message before a `Save` whose state dict is copied in waves; its socket to the trainer is sent with it."""

    piece_bytes: int


@dataclass(frozen=True, slots=True)
class NewGroup:
    """Message with a rank's connection settings for a process group, a `rank_place.Seat`."""

    seat: Any


@dataclass(frozen=True, slots=True)
class NewStructure:
    """Message with the structure of a state dict, a `staging.copy_state.Structure`, for later saves."""

    structure: Any


@dataclass(frozen=True, slots=True)
class Forget:
    """Request to drop the structure of a state dict from the worker's cache."""

    identifier: str


@dataclass(frozen=True, slots=True)
class ForgetArena:
    """Request to unmap an arena (shared memory for staged tensors) that is not used any more, to free memory."""

    number: int


@dataclass(frozen=True, slots=True)
class Save:
    """Request to run one save.

    Attributes:
        number: Number of the save, which the answer repeats.
        structure: Identifier of the structure of the state dict.
        arena: Number of the arena with the staged tensors.
        group: Key of the group's connection settings, from `NewGroup`.
        ticket: Sequence number of the save, a `rank_place.Ticket`.
        checkpoint_id: Checkpoint id of the save; None for the storage writer's own id.
        use_collectives: Whether ranks plan together; with False, every rank plans alone.
    """

    number: int
    structure: str
    arena: int
    group: str
    ticket: Any
    checkpoint_id: Any
    use_collectives: bool
    objects: dict[int, Any] = field(default_factory=dict)
    """Objects that have changed since the last save: position in the structure → object."""
    means: bytes | None = None
    """Pickled `(storage writer, planner, plan)`; None if equal to those of the last save of the same structure."""
    surroundings: Any = None
    """Changed working directory and environment variables, a `trainer_environment.SurroundingsChange`."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Message that the worker has imported its modules and is ready."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat: message that the worker process is alive."""


@dataclass(frozen=True, slots=True)
class EventSent:
    """Message with a `CheckpointEvent` of a save, for the observers in the trainer."""

    event: Any


@dataclass(frozen=True, slots=True)
class Logged:
    """Message with a log record of the worker, which the trainer logs."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Warned:
    """Message with a warning of the worker, which the trainer issues; `category` is the pickled warning class."""

    category: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Saved:
    """Message that a save succeeded, with the save id by which the trainer reads the metadata, or with the metadata."""

    number: int
    save_id: str | None
    metadata: bytes | None


@dataclass(frozen=True, slots=True)
class Failed:
    """Message that a save, or the worker's start (`number` 0), failed, with a `dcp_ranks.phases.outcomes.Failure`."""

    number: int
    failure: Any


def send_message(connection: socket.socket, message: object, descriptor: int | None = None) -> int:
    """Send one complete message, with a file descriptor if one is given; returns the number of bytes sent.

    Raises:
        TimeoutError: The connection has a timeout, and the peer accepted nothing for that long.
    """
    data = pickle.dumps(message, protocol=5)
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:  # a timeout is for each part: what takes long is not silent
        left = left[connection.send(left[:_PART_BYTES]) :]
    if descriptor is not None:
        socket.send_fds(connection, [b"f"], [descriptor])
    return _LENGTH.size + len(data)


def read_message(connection: socket.socket) -> Any:
    """Receive one complete message; for a `NewArena` or `NewWaves`, returns message and file descriptor.

    Raises:
        EOFError: The peer has closed the connection.
        TimeoutError: The connection has a timeout, and no data arrived for that long.
        NotUnderstoodError: The message cannot be unpickled.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    data = _read(connection, length)
    try:
        message = pickle.loads(data)
    except Exception as error:
        raise NotUnderstoodError from error
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
