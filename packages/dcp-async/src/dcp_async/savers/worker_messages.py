"""The message protocol between trainer and worker, and its framing on their socket. Imports no torch.

Messages are pickled, which is safe since both processes belong to the same program and user. A file descriptor is sent
with one extra byte after its message (SCM_RIGHTS).
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
    "NotUnderstoodError",
    "Ready",
    "Save",
    "Saved",
    "Warned",
    "read_message",
    "send_message",
]


class NotUnderstoodError(Exception):
    """A message arrived completely, but cannot be unpickled in this process; the cause has the reason."""


_LENGTH = struct.Struct("<Q")
_PART_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Hello:
    """The trainer's first message: the worker's options, a `WorkerOptions`."""

    sys_path: tuple[str, ...]
    options: Any
    log_level: int


@dataclass(frozen=True, slots=True)
class NewArena:
    """Request to map a memory file as an arena, the shared memory that holds copied tensors.

    The descriptor of the file is sent with this message. The arena replaces an earlier one of the same number.
    """

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A rank's place in a group, as a `rank_place.Seat`."""

    seat: Any


@dataclass(frozen=True, slots=True)
class NewStructure:
    """The structure of a state, as a `staging.copy_state.Structure`."""

    structure: Any


@dataclass(frozen=True, slots=True)
class Forget:
    """Request to drop a structure that is no longer saved."""

    identifier: str


@dataclass(frozen=True, slots=True)
class ForgetArena:
    """Request to unmap an arena that is no longer used, so that its memory is freed."""

    number: int


@dataclass(frozen=True, slots=True)
class Save:
    """Request to run one save. Fields that are None have the values of the last save of that structure."""

    number: int
    structure: str
    arena: int
    group: str
    ticket: Any
    checkpoint_id: Any
    use_collectives: bool
    objects: dict[int, Any] = field(default_factory=dict)
    """Changed objects, by their position in the structure."""
    means: bytes | None = None
    """Pickled `(storage writer, planner, plan)`."""
    surroundings: Any = None
    """Change of the trainer's environment, as a `trainer_environment.SurroundingsChange`."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Message that the worker has imported what it needs."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat of the worker."""


@dataclass(frozen=True, slots=True)
class EventSent:
    """A `CheckpointEvent` of a save, for the observers in the trainer."""

    event: Any


@dataclass(frozen=True, slots=True)
class Logged:
    """A log record of the worker."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning of the worker; `category` is pickled."""

    category: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Saved:
    """Message that a save succeeded. Its metadata is in storage under `save_id`, or in `metadata`."""

    number: int
    save_id: str | None
    metadata: bytes | None


@dataclass(frozen=True, slots=True)
class Failed:
    """Message that a save, or the worker's start (number 0), failed; has a `dcp_ranks.phases.outcomes.Failure`."""

    number: int
    failure: Any


def send_message(connection: socket.socket, message: object, descriptor: int | None = None) -> int:
    """Send one complete message, with its file descriptor if any; returns the number of bytes.

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
    """Receive one complete message; a `NewArena` is returned as a pair with its descriptor.

    Raises:
        EOFError: The peer has closed the connection.
        TimeoutError: The connection has a timeout, and nothing arrived.
        NotUnderstoodError: The message does not unpickle.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    data = _read(connection, length)
    try:
        message = pickle.loads(data)
    except Exception as error:
        raise NotUnderstoodError from error
    if not isinstance(message, NewArena):
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
