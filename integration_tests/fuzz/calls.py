"""Any bytes → a pickle that is well formed and knows the allow-list by heart.

A fuzzer would hardly find the name of one allowed function by changing bytes; what the functions make of arguments
that they do not expect is what this is after.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from dcp_core.objects.allowed_globals import default_globals

__all__ = ["pickle_of"]

T = TypeVar("T")

_NAMES = sorted(default_globals())
_NUMBERS = (0, 1, -1, 2, 7, 63, 64, 65, 255, 1 << 15, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 40, 1 << 62, -(1 << 63))
_TEXTS = (
    "",
    "0",
    "1",
    "cpu",
    "cuda:0",
    "meta",
    "<",
    ">",
    "|",
    "f4",
    "O8",
    "V3",
    "M8[ns]",
    "b",
    "storage",
    "little",
    "x",
)
_MAX_OPCODES = 400


def pickle_of(data: bytes) -> bytes:
    """A pickle of protocol 4, in which each byte of `data` chose an opcode or an argument."""
    made = bytearray(b"\x80\x04")
    choices = iter(data)
    depth = 0
    for _ in range(_MAX_OPCODES):
        choice = next(choices, None)
        if choice is None:
            break
        opcode, change = _OPCODES[choice % len(_OPCODES)](choices, depth)
        made += opcode
        depth = max(0, depth + change)
    return bytes(made + b".")


Made = tuple[bytes, int]
"""An opcode with its argument, and by how much the stack grows."""


def _integer(number: int) -> bytes:
    return b"\x8a\x09" + number.to_bytes(9, "little", signed=True)


def _text(value: str) -> bytes:
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


def _choice(choices: Iterator[int], among: Sequence[T]) -> T:
    return among[next(choices, 0) % len(among)]


def _global(choices: Iterator[int], depth: int) -> Made:
    path = _NAMES[(next(choices, 0) << 8 | next(choices, 0)) % len(_NAMES)]
    module, _, name = path.rpartition(".")
    return _text(module) + _text(name) + b"\x93", 1


def _tuple(choices: Iterator[int], depth: int) -> Made:
    count = min(depth, next(choices, 0) % 4)
    return (b")", b"\x85", b"\x86", b"\x87")[count], 1 - count


def _storage(choices: Iterator[int], depth: int) -> Made:
    kind = _choice(choices, ("FloatStorage", "LongStorage", "ByteStorage", "BoolStorage", "QInt8Storage"))
    count = _choice(choices, _NUMBERS)
    named = b"ctorch\n" + kind.encode() + b"\n"
    return b"(" + _text("storage") + named + _text("0") + _text("cpu") + _integer(count) + b"tQ", 1


def _fixed(opcode: bytes, change: int) -> Callable[[Iterator[int], int], Made]:
    return lambda choices, depth: (opcode if depth + min(change, 0) >= 0 else b"N", change)


_OPCODES: tuple[Callable[[Iterator[int], int], Made], ...] = (
    _global,
    _global,
    _storage,
    _tuple,
    _tuple,
    lambda choices, depth: (_integer(_choice(choices, _NUMBERS)), 1),
    lambda choices, depth: (b"K" + bytes([next(choices, 0)]), 1),
    lambda choices, depth: (_text(_choice(choices, _TEXTS)), 1),
    lambda choices, depth: (b"C" + bytes([size := next(choices, 0) % 65]) + bytes(size), 1),
    lambda choices, depth: (b"G" + struct.pack(">d", _choice(choices, (0.0, -1.5, 1e300, float("nan")))), 1),
    _fixed(b"R", -1),
    _fixed(b"R", -1),
    _fixed(b"R", -1),
    _fixed(b"\x81", -1),
    _fixed(b"b", -1),
    _fixed(b"a", -1),
    _fixed(b"s", -2),
    _fixed(b"2", 1),
    _fixed(b"0", -1),
    _fixed(b"N", 1),
    _fixed(b"\x88", 1),
    _fixed(b"]", 1),
    _fixed(b"}", 1),
    _fixed(b"\x94", 0),
    lambda choices, depth: (b"h" + bytes([next(choices, 0) % 16]), 1),
)
