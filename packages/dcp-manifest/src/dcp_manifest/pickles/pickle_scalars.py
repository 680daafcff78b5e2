"""Reader of the pickle opcodes that push a number, a string, bytes, or an empty container."""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["SCALAR_OPCODES", "ScalarReader"]

# Python's own default limit of digits: conversion takes quadratic time.
_MAX_DIGITS = 4300
_U32, _I32, _F64 = struct.Struct("<I"), struct.Struct("<i"), struct.Struct(">d")


class ScalarReader:
    """Reader of scalar pickle opcodes, with a position and a stack; each method `do_x` executes one opcode.

    Lengths are checked against the remaining bytes before memory is allocated.

    Args:
        data: Bytes that contain the pickle.
        at: Position in `data` at which reading begins.
    """

    __slots__ = ("at", "data", "stack")

    def __init__(self, data: bytes, at: int) -> None:
        self.data = data
        self.at = at
        self.stack: list[Any] = []

    def take(self, count: int) -> bytes:
        """Read `count` bytes."""
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise ValueError("the pickle is truncated")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, width: int) -> int:
        """Read an unsigned integer of `width` bytes."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> bytes:
        """Read the bytes up to the end of the line."""
        end = self.data.index(b"\n", self.at)
        taken = self.data[self.at : end]
        self.at = end + 1
        return taken

    def decimal(self, base: int = 10) -> int:
        """Read an integer that is written as digits and ends with the line."""
        digits = self.line()
        if len(digits) > _MAX_DIGITS:
            raise ValueError(f"an int of {len(digits)} digits")
        return int(digits.removesuffix(b"L"), base)

    def do_binint(self) -> None:
        """Push an int of 4 bytes."""
        self.stack.append(_I32.unpack_from(self.data, self.at)[0])
        self.at += 4

    def do_binint1(self) -> None:
        """Push an int of 1 byte."""
        self.stack.append(self.data[self.at])
        self.at += 1

    def do_binint2(self) -> None:
        """Push an int of 2 bytes."""
        self.stack.append(self.number(2))

    def do_long(self, width: int) -> None:
        """Push an int of any size; its length field has `width` bytes."""
        self.stack.append(int.from_bytes(self.take(self.number(width)), "little", signed=True))

    def do_text_int(self) -> None:
        """Push an int or bool that is written as digits."""
        if self.data[self.at : self.at + 3] in (b"00\n", b"01\n"):
            self.stack.append(self.line() == b"01")
        else:
            self.stack.append(self.decimal(0))

    def do_text_long(self) -> None:
        """Push an int that is written as digits."""
        self.stack.append(self.decimal(0))

    def do_text_float(self) -> None:
        """Push a float that is written as digits."""
        self.stack.append(float(self.line()))

    def do_binfloat(self) -> None:
        """Push a float of 8 bytes."""
        self.stack.append(_F64.unpack_from(self.data, self.at)[0])
        self.at += 8

    def do_unicode(self, width: int) -> None:
        """Push a string; its length field has `width` bytes."""
        self.stack.append(self.take(self.number(width)).decode("utf-8", "surrogatepass"))

    def do_unicode4(self) -> None:
        """Push a string; its length field has 4 bytes."""
        start = self.at + 4
        self.at = start + _U32.unpack_from(self.data, self.at)[0]
        if self.at > len(self.data):
            raise ValueError("the pickle is truncated")
        self.stack.append(self.data[start : self.at].decode("utf-8", "surrogatepass"))

    def do_text_unicode(self) -> None:
        """Push a string that is written with escape sequences."""
        self.stack.append(self.line().decode("raw-unicode-escape"))

    def do_python2_string(self, width: int) -> None:
        """Push a string of Python 2; its length field has `width` bytes."""
        self.stack.append(self.take(self.number(width)).decode("utf-8"))

    def do_text_string(self) -> None:
        """Push a quoted string of Python 2."""
        quoted = self.line()
        if len(quoted) < 2 or quoted[:1] != quoted[-1:] or quoted[:1] not in (b'"', b"'"):
            raise ValueError("a string without quotes")
        unescape: Callable[[bytes], tuple[bytes, int]] = codecs.escape_decode
        self.stack.append(unescape(quoted[1:-1])[0].decode("utf-8"))

    def do_bytes(self, width: int) -> None:
        """Push a bytes object; its length field has `width` bytes."""
        self.stack.append(self.take(self.number(width)))

    def do_bytearray(self) -> None:
        """Push a bytearray."""
        self.stack.append(bytearray(self.take(self.number(8))))


SCALAR_OPCODES: Mapping[int, Callable[[Any], None]] = {
    ord("N"): lambda reader: reader.stack.append(None),
    0x88: lambda reader: reader.stack.append(True),
    0x89: lambda reader: reader.stack.append(False),
    ord(")"): lambda reader: reader.stack.append(()),
    ord("]"): lambda reader: reader.stack.append([]),
    ord("}"): lambda reader: reader.stack.append({}),
    0x8F: lambda reader: reader.stack.append(set()),
    ord("I"): ScalarReader.do_text_int,
    ord("L"): ScalarReader.do_text_long,
    ord("F"): ScalarReader.do_text_float,
    ord("J"): ScalarReader.do_binint,
    ord("K"): ScalarReader.do_binint1,
    ord("M"): ScalarReader.do_binint2,
    ord("G"): ScalarReader.do_binfloat,
    0x8A: lambda reader: reader.do_long(1),
    0x8B: lambda reader: reader.do_long(4),
    0x8C: lambda reader: reader.do_unicode(1),
    ord("X"): ScalarReader.do_unicode4,
    0x8D: lambda reader: reader.do_unicode(8),
    ord("V"): ScalarReader.do_text_unicode,
    ord("S"): ScalarReader.do_text_string,
    ord("U"): lambda reader: reader.do_python2_string(1),
    ord("T"): lambda reader: reader.do_python2_string(4),
    ord("C"): lambda reader: reader.do_bytes(1),
    ord("B"): lambda reader: reader.do_bytes(4),
    0x8E: lambda reader: reader.do_bytes(8),
    0x96: ScalarReader.do_bytearray,
}
