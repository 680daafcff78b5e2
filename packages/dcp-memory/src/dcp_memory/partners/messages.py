"""Messages between the leaders of two hosts: an offer of files, the wanted ones, pieces of them, and the end.

Not in this module: connections (see `dcp_ranks`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["MOST_FILES", "Kind", "Message", "Offer", "decode", "encode", "pack_numbers", "unpack_numbers"]

MOST_FILES = 1 << 17
"""Largest number of files of an offer, so that the numbers of wanted ones fit into a message."""


class Kind(IntEnum):
    """Kind of a message."""

    OFFER = 1
    """The files that the sender has, in the payload."""
    WANTED = 2
    """The numbers of the files that the receiver lacks."""
    PIECE = 3
    """Bytes of a file, in the payload."""
    DONE = 4
    """All wanted files are complete with the receiver."""
    REFUSED = 5
    """The receiver takes no more; the text says why."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message."""

    kind: Kind
    number: int = 0
    """Number of the file in the offer."""
    offset: int = 0
    """Position of the piece in its file."""
    crc: int = 0
    """CRC32 of the piece."""
    text: str = ""
    """Numbers of wanted files, or a reason."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The part of a checkpoint that a host has written."""

    host: str
    """Id of the host's place."""
    save_id: str
    sizes: Mapping[str, int]
    """Names of its data files → sizes in bytes; files are numbered in this order."""

    def to_bytes(self) -> bytes:
        """Return the offer as the payload of a message."""
        return json.dumps([self.host, self.save_id, [*self.sizes.items()]]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Offer:
        """Return the offer in a payload; raises ValueError for anything else."""
        try:
            host, save_id, sizes = json.loads(data)
            return cls(str(host), str(save_id), {str(name): int(size) for name, size in sizes})
        except TypeError as error:
            raise ValueError(f"an offer is malformed: {error}") from error


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return json.dumps([message.kind, message.number, message.offset, message.crc, message.text]).encode()


def decode(data: bytes) -> Message:
    """Return the message in bytes; raises ValueError for anything else."""
    try:
        kind, number, offset, crc, text = json.loads(data)
        return Message(Kind(kind), int(number), int(offset), int(crc), str(text))
    except TypeError as error:
        raise ValueError(f"a message is malformed: {error}") from error


def pack_numbers(numbers: Collection[int], count: int) -> str:
    """Return numbers below `count` as the hexadecimal digits of a set of bits."""
    bits = bytearray((count + 7) // 8)
    for number in numbers:
        bits[number // 8] |= 1 << number % 8
    return bits.hex()


def unpack_numbers(text: str) -> Sequence[int]:
    """Return the numbers, ascending, from `pack_numbers`; raises ValueError for anything else."""
    return [
        8 * place + bit for place, byte in enumerate(bytes.fromhex(text)) if byte for bit in range(8) if byte >> bit & 1
    ]
