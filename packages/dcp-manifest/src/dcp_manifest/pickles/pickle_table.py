"""Allow-table of the safe pickle reader: names, calls, states and containers, and a work budget.

Replacements are called instead of real functions.
"""

from __future__ import annotations

import _compat_pickle
import codecs
import collections
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_FREE_WORK = 1 << 20
_WORK_PER_BYTE = 2  # bytes of an array are encoded from text, and then copied
# Tuples are hashed by recursion in C. This depth of nesting is still safe.
_MAX_KEY_PARTS = 1000
# Limit of keys with the same hash in one container, since each is compared with all the others.
_MAX_SAME_HASH = 1000
_SMALL = 1 << 60  # hashes of smaller integers are distinct
_FRAGILE = frozenset((collections.deque, collections.defaultdict, np.ndarray))
_MAX_NESTED = 50
_CHEAP = frozenset((str, bytes, bool, type(None)))


class UnsafePickleError(ValueError):
    """The pickle has a forbidden feature, or needs too much work or memory."""


class ForbiddenGlobalError(UnsafePickleError):
    """The pickle names a global that the table does not allow; `path` is its module and name."""

    def __init__(self, path: str) -> None:
        super().__init__(f"asks for {path}")
        self.path = path


class Budget:
    """Limit of the elements that a pickle's calls may copy and its keys may hash: two per stored byte, and 1 Mi."""

    __slots__ = ("_crowds", "_late", "_left", "_levels", "_within")

    def __init__(self, stored_bytes: int) -> None:
        self._left = _WORK_PER_BYTE * stored_bytes + _FREE_WORK
        # id of a container that is freed by recursion → the container and its depth of nesting, also for nested ones
        self._levels: dict[int, tuple[object, int]] = {}
        self._within: dict[int, object] = {}
        self._late = 0
        # id of a container → the container, and the number of its keys for each hash
        self._crowds: dict[int, tuple[object, dict[int, int]]] = {}

    def spend(self, amount: int) -> None:
        """Charge `amount` elements before the work. Raises UnsafePickleError."""
        self._left -= amount
        if self._left < 0:
            raise UnsafePickleError("needs far more memory or work than its size justifies")

    def admit_key(self, container: object, key: Any) -> None:
        """Check that a key is cheap to hash and compare, before it goes into a dict or set.

        Nested tuples with shared elements take exponential time, and keys with equal hashes are compared pair by pair.
        Raises UnsafePickleError or TypeError.
        """
        if not _is_cheap(key):
            _, crowds = self._crowds.setdefault(id(container), (container, {}))
            self._admit(key, crowds)

    def admit_keys(self, keys: Iterable[Any]) -> None:
        """Check a new container's keys."""
        crowds: dict[int, int] = {}
        for key in keys:
            if not _is_cheap(key):
                self._admit(key, crowds)

    def _admit(self, key: Any, crowds: dict[int, int]) -> None:
        self._weigh(key)
        place = hash(key)
        crowds[place] = crowd = crowds.get(place, 0) + 1
        if crowd > _MAX_SAME_HASH:
            raise UnsafePickleError(f"has more than {_MAX_SAME_HASH} keys of the same hash")

    def nest(self, container: object, values: Iterable[Any]) -> None:
        """Limit the nesting of containers, after `values` were added: freeing a deep `deque` overflows the C stack."""
        inner = [value for value in values if type(value) in _FRAGILE] if type(container) in _FRAGILE else []
        if not inner:
            return
        # A container may be filled after it was put into another one, whose depth must then grow as well.
        self._late += id(container) in self._within
        level = 1 + max(self._levels.get(id(value), (value, 0))[1] for value in inner)
        known = self._levels.get(id(container), (container, 0))[1]
        self._levels[id(container)] = container, max(level, known)
        self._within.update((id(value), value) for value in inner)
        if level > _MAX_NESTED or self._late > _MAX_NESTED:
            raise UnsafePickleError(f"nests {described(container)} more than {_MAX_NESTED} deep, which is not allowed")

    def _weigh(self, key: Any) -> None:
        parts, nested = [key], 0
        while parts:
            part = parts.pop()
            if _is_cheap(part):
                continue
            if not isinstance(part, tuple | frozenset):
                self.spend(sys.getsizeof(part) >> 4)
                continue
            inner = list(part)
            self.spend(len(inner) + 1)
            nested += sum(isinstance(part, tuple) or isinstance(each, tuple | frozenset) for each in inner)
            if nested > _MAX_KEY_PARTS:
                raise UnsafePickleError(f"a key or set item of more than {_MAX_KEY_PARTS} parts is not allowed")
            parts += inner


def _is_cheap(key: Any) -> bool:
    kind = type(key)
    return kind in _CHEAP or (kind is int and -_SMALL < key < _SMALL)


Call = Callable[[Budget, tuple[Any, ...]], Any]
"""Replaces a call, and returns its value or raises."""
New = Callable[[Budget, tuple[Any, ...], dict[str, Any]], Any]
"""Replaces a class's `__new__`, without `__init__`."""
State = Callable[[Budget, Any, Any], Any]
"""Sets an instance's state, and returns it or a replacement."""


@dataclass(frozen=True, slots=True)
class RecordClass:
    """Stand-in for a class with `Record`s as instances."""

    name: str


@dataclass(frozen=True, slots=True)
class Function:
    """Stand-in for a function."""

    name: str
    call: Call


class Record:
    """Instance of a `RecordClass`: class name and state."""

    __slots__ = ("name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Any = None


@dataclass(frozen=True, slots=True)
class Opaque:
    """Stand-in for an unknown global: calls, states and items are dropped."""

    name: str

    def extend(self, items: Iterable[Any]) -> None:
        """Drop items."""

    def update(self, items: Iterable[Any]) -> None:
        """Drop items."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop an item."""


@dataclass(frozen=True, slots=True)
class PickleTable:
    """Allow-table. Types and objects are matched by identity; attributes of allowed objects are refused."""

    find: Callable[[str], Any]
    """Full Python 3 name of a global → a stand-in of this module, or any value.

    It raises `ForbiddenGlobalError`, or returns an `Opaque` to ignore a class.
    """
    calls: Mapping[int, Call] = field(default_factory=dict)
    """`id` of a value of `find` → function that replaces its calls; others cannot be called."""
    news: Mapping[int, New] = field(default_factory=dict)
    """`id` of a class → function that replaces its `__new__`."""
    states: Mapping[type, State] = field(default_factory=dict)
    lists: frozenset[type] = frozenset((list,))
    """Types that may get items by `extend`."""
    dicts: frozenset[type] = frozenset((dict,))
    """Types that may get pairs by `[]`."""
    sets: frozenset[type] = frozenset((set,))
    """Types that may get items by `update`."""
    drafts: frozenset[type] = frozenset()
    """Immutable types, with instances that a state replaces."""
    complete: Callable[[], PickleTable] | None = None
    """Function that returns the table to use from the first global on; None to keep this one."""


def described(value: object) -> str:
    """Describe a value by its type: a hostile `repr` may be endless."""
    if isinstance(value, (Record, RecordClass, Function, Opaque)):
        return value.name
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return f"a {type(value).__name__}"


def python3_name(module: str, name: str) -> str:
    """Return a global's Python 3 name, from the Python 2 name of old protocols."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[(module, name)]
    else:
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}"


# Python's own default limit of digits: conversion takes quadratic time.
_MAX_DIGITS = 4300
_U32, _I32, _F64 = struct.Struct("<I"), struct.Struct("<i"), struct.Struct(">d")


class ScalarReader:
    """Reader of scalar opcodes; each method `do_x` executes one opcode.

    Lengths are checked before memory is allocated.
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
        """Read an unsigned integer."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> bytes:
        """Read to the end of the line."""
        end = self.data.index(b"\n", self.at)
        taken = self.data[self.at : end]
        self.at = end + 1
        return taken

    def decimal(self, base: int = 10) -> int:
        """Read an integer in digits."""
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

    def do_long(self, width: int) -> None:
        """Push an int with a length field."""
        self.stack.append(int.from_bytes(self.take(self.number(width)), "little", signed=True))

    def do_text_int(self) -> None:
        """Push an int or bool in digits."""
        if self.data[self.at : self.at + 3] in (b"00\n", b"01\n"):
            self.stack.append(self.line() == b"01")
        else:
            self.stack.append(self.decimal(0))

    def do_binfloat(self) -> None:
        """Push a float of 8 bytes."""
        self.stack.append(_F64.unpack_from(self.data, self.at)[0])
        self.at += 8

    def do_unicode(self, width: int) -> None:
        """Push a string with a length field."""
        self.stack.append(self.take(self.number(width)).decode("utf-8", "surrogatepass"))

    def do_unicode4(self) -> None:
        """Push a string with a 4-byte length."""
        start = self.at + 4
        self.at = start + _U32.unpack_from(self.data, self.at)[0]
        if self.at > len(self.data):
            raise ValueError("the pickle is truncated")
        self.stack.append(self.data[start : self.at].decode("utf-8", "surrogatepass"))

    def do_python2_string(self, width: int) -> None:
        """Push a Python 2 string."""
        self.stack.append(self.take(self.number(width)).decode("utf-8"))

    def do_text_string(self) -> None:
        """Push a quoted Python 2 string."""
        quoted = self.line()
        if len(quoted) < 2 or quoted[:1] != quoted[-1:] or quoted[:1] not in (b'"', b"'"):
            raise ValueError("a string without quotes")
        unescape: Callable[[bytes], tuple[bytes, int]] = codecs.escape_decode
        self.stack.append(unescape(quoted[1:-1])[0].decode("utf-8"))

    def do_bytes(self, width: int) -> None:
        """Push bytes with a length field."""
        self.stack.append(self.take(self.number(width)))


SCALAR_OPCODES: Mapping[int, Callable[[Any], None]] = {
    ord("N"): lambda reader: reader.stack.append(None),
    0x88: lambda reader: reader.stack.append(True),
    0x89: lambda reader: reader.stack.append(False),
    ord(")"): lambda reader: reader.stack.append(()),
    ord("]"): lambda reader: reader.stack.append([]),
    ord("}"): lambda reader: reader.stack.append({}),
    0x8F: lambda reader: reader.stack.append(set()),
    ord("I"): ScalarReader.do_text_int,
    ord("L"): lambda reader: reader.stack.append(reader.decimal(0)),
    ord("F"): lambda reader: reader.stack.append(float(reader.line())),
    ord("J"): ScalarReader.do_binint,
    ord("K"): ScalarReader.do_binint1,
    ord("M"): lambda reader: reader.stack.append(reader.number(2)),
    ord("G"): ScalarReader.do_binfloat,
    0x8A: lambda reader: reader.do_long(1),
    0x8B: lambda reader: reader.do_long(4),
    0x8C: lambda reader: reader.do_unicode(1),
    ord("X"): ScalarReader.do_unicode4,
    0x8D: lambda reader: reader.do_unicode(8),
    ord("V"): lambda reader: reader.stack.append(reader.line().decode("raw-unicode-escape")),
    ord("S"): ScalarReader.do_text_string,
    ord("U"): lambda reader: reader.do_python2_string(1),
    ord("T"): lambda reader: reader.do_python2_string(4),
    ord("C"): lambda reader: reader.do_bytes(1),
    ord("B"): lambda reader: reader.do_bytes(4),
    0x8E: lambda reader: reader.do_bytes(8),
    0x96: lambda reader: reader.stack.append(bytearray(reader.take(reader.number(8)))),
}
