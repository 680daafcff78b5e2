"""Pickle writer, opcode by opcode: values, instances of classes that need not be importable, and a memo.

Pickles have protocol 4, or protocol 2 if `torch.load` requires it (`text_2`, `global_2`; other opcodes are in both).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from dcp_manifest.container.strings import encode_text

__all__ = ["MEMOIZE", "PickleWriter", "collected", "global_", "global_2", "integer", "text", "text_2"]

MEMOIZE = b"\x94"
_U32 = struct.Struct("<I")
_SMALL = [bytes((75, value)) for value in range(256)]
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")


def integer(value: int) -> bytes:
    """Return pickle opcodes that push an int on the stack."""
    if 0 <= value < 256:
        return _SMALL[value]
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data


def text(value: str) -> bytes:
    """Return pickle opcodes that push a str on the stack."""
    data = encode_text(value)
    return b"\x8c" + bytes((len(data),)) + data if len(data) < 256 else text_2(value)


def text_2(value: str) -> bytes:
    """Return pickle opcodes of protocol 2 that push a str on the stack."""
    data = encode_text(value)
    return b"X" + _U32.pack(len(data)) + data


def global_(module: str, name: str) -> bytes:
    """Return pickle opcodes that push the class or function `name` of a module on the stack."""
    return text(module) + text(name) + b"\x93"


def global_2(module: str, name: str) -> bytes:
    """Return pickle opcodes of protocol 2 that push the class or function `name` of a module on the stack."""
    return f"c{module}\n{name}\n".encode()


def collected(items: Sequence[bytes]) -> bytes:
    """Return pickle opcodes that push a tuple on the stack, given the opcodes that push its items."""
    if len(items) <= 3:
        return b"".join((*items, _TUPLES[len(items)]))
    return b"".join((b"(", *items, b"t"))


class PickleWriter:
    """Builder of a pickle from opcodes. A memoized value can be pushed again by a few bytes.

    Args:
        start: First bytes of the pickle; by default the opcode that says protocol 4.
    """

    def __init__(self, start: bytes = b"\x80\x04") -> None:
        self._parts: list[bytes] = [start]
        self.put = self._parts.append
        """Append opcodes."""
        self._remembered = 0

    def put_all(self, parts: Iterable[bytes]) -> None:
        """Append several sequences of opcodes."""
        self._parts.extend(parts)

    def remember(self, opcodes: bytes) -> bytes:
        """Append opcodes that push a value, and memoize it; returns opcodes that push the same object again."""
        self._parts.append(opcodes + MEMOIZE)
        return self.reserve()

    def reserve(self) -> bytes:
        """Reserve the next memo slot; returns opcodes that push the value in it. The caller must append a `MEMOIZE`."""
        number = self._remembered
        self._remembered += 1
        return b"h" + bytes((number,)) if number < 256 else b"j" + _U32.pack(number)

    def prepare(self, opcodes: bytes) -> bytes:
        """Memoize a value like `remember`, then pop it from the stack; returns opcodes that push it."""
        reference = self.remember(opcodes)
        self._parts.append(b"0")
        return reference

    def getvalue(self) -> bytes:
        """Return the finished pickle. Exactly one value must be on the stack: the pickled value."""
        return b"".join((*self._parts, b"."))
