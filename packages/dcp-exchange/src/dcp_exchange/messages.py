"""Messages between ranks of an exchange: what is where, what is not needed any more, and that all is over."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

__all__ = ["Kind", "Message", "decode", "encode"]

_FORM = struct.Struct("<BQII?")


class Kind(enum.IntEnum):
    """Kind of a message."""

    ARENA = 0
    """The descriptor of the sender's arena comes with this message; `piece` is the size of its slots in bytes."""
    READY = 1
    """A piece lies in a slot of the sender's arena."""
    DONE = 2
    """The sender has taken what it wants from a slot of the receiver's arena."""
    PIECE = 3
    """The bytes of a piece follow as a payload."""
    STOP = 4
    """The exchange has failed on some rank, whose text follows: give up. `checked`: the checkpoint was replaced."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        kind: Kind of the message, on which the meaning of the other fields depends.
        piece: Number of a piece.
        slot: Number of a slot.
        origin: Number of the host on which the piece was read from storage.
        checked: Whether the piece was checked on its way to this host.
        text: Further text.
    """

    kind: Kind
    piece: int = 0
    slot: int = 0
    origin: int = 0
    checked: bool = False
    text: str = ""


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    head = _FORM.pack(message.kind, message.piece, message.slot, message.origin, message.checked)
    return head + message.text.encode("utf-8", "replace")


def decode(data: bytes) -> Message:
    """Return the message in `data`. Raises ValueError if it is none."""
    try:
        kind, piece, slot, origin, checked = _FORM.unpack_from(data)
        return Message(Kind(kind), piece, slot, origin, checked, data[_FORM.size :].decode())
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{data[:32]!r} is no message of an exchange") from error
