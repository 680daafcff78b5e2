"""Reading a pickle without running anything: values, and records of classes that somebody else knows.

A small machine of its own instead of `pickle.Unpickler`: names are looked up in a table of the caller and are never
imported, calls reach only functions of that table, memory stays within a constant factor of the pickle's length, and
nothing is hashed but strings, numbers and records (a deep tuple as a key would end the process).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["BrokenPickleError", "Function", "Record", "RecordClass", "UnsafePickleError", "described", "read_pickle"]

_MAX_INT_BYTES = 255
_U32, _I32 = struct.Struct("<I"), struct.Struct("<i")


class BrokenPickleError(ValueError):
    """The bytes are no pickle, or an incomplete one. `offset` is where reading stopped."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


class UnsafePickleError(ValueError):
    """The pickle asks for something that is not in the caller's table."""


@dataclass(frozen=True, slots=True)
class RecordClass:
    """Stands for a class: instances become `Record`s."""

    name: str


@dataclass(frozen=True, slots=True)
class Function:
    """Stands for a function that the pickle calls: `call` of its arguments is taken instead."""

    name: str
    call: Callable[[tuple[Any, ...]], Any]


class Record:
    """An instance of a `RecordClass`, as its state."""

    __slots__ = ("name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Any = None


def read_pickle(data: bytes, resolve: Callable[[str, str], object]) -> tuple[Any, int]:
    """The value of the pickle at the beginning of `data`.

    Args:
        data: Bytes of protocol 2 or newer; may go on behind the pickle.
        resolve: Gives what stands for (module, name): a `RecordClass`, a `Function`, or a plain value; raises
            `UnsafePickleError` for a name that it does not know.

    Returns:
        The value, and where the pickle ends.

    Raises:
        BrokenPickleError: It is none.
        UnsafePickleError: From `resolve`, or since the pickle needs an opcode that has no place in plain data.
    """
    machine = _Machine(data, resolve)
    try:
        return machine.run(), machine.at
    except UnsafePickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise BrokenPickleError(str(error) or type(error).__name__, machine.at) from error


class _Machine:
    """The state of reading one pickle; each method `do_x` carries out one opcode."""

    def __init__(self, data: bytes, resolve: Callable[[str, str], object]) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.resolve = resolve

    def run(self) -> Any:
        data, handlers = self.data, _HANDLERS
        while True:
            opcode = data[self.at]
            self.at += 1
            if opcode == _STOP:
                if self.below:
                    raise ValueError("the pickle ends within a group")
                (value,) = self.stack
                return value
            handlers[opcode](self)

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise ValueError("the pickle is truncated")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        taken = self.data[self.at : end]
        self.at = end + 1
        return taken.decode("utf-8")

    def since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.below.pop()
        return items

    def do_proto(self) -> None:
        if self.number(1) > 5:
            raise ValueError("the pickle's protocol is newer than 5")

    def do_frame(self) -> None:
        self.number(8)

    def do_mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def do_pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def do_pop_mark(self) -> None:
        self.since_mark()

    def do_binint(self) -> None:
        self.stack.append(_I32.unpack_from(self.data, self.at)[0])
        self.at += 4

    def do_binint1(self) -> None:
        self.stack.append(self.data[self.at])
        self.at += 1

    def do_binint2(self) -> None:
        self.stack.append(self.number(2))

    def do_long1(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.number(1)), "little", signed=True))

    def do_long4(self) -> None:
        length = self.number(4)
        if length > _MAX_INT_BYTES:
            raise ValueError(f"an int of {length} bytes")
        self.stack.append(int.from_bytes(self.take(length), "little", signed=True))

    def do_unicode(self, width: int) -> None:
        self.stack.append(self.take(self.number(width)).decode("utf-8", "surrogatepass"))

    def do_bytes(self, width: int) -> None:
        self.stack.append(self.take(self.number(width)))

    def do_tuple(self) -> None:
        items = self.since_mark()
        self.stack.append(tuple(items))

    def do_tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError("the stack is too short")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    def do_append(self) -> None:
        value = self.stack.pop()
        _list(self.stack[-1]).append(value)

    def do_appends(self) -> None:
        items = self.since_mark()
        _list(self.stack[-1]).extend(items)

    def do_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        _dict(self.stack[-1])[_key(key)] = value

    def do_setitems(self) -> None:
        items = self.since_mark()
        target = _dict(self.stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key if type(key) is str else _key(key)] = value

    def do_global(self) -> None:
        module = self.line()
        self.stack.append(self.resolve(module, self.line()))

    def do_stack_global(self) -> None:
        name = self.stack.pop()
        module = self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError("a global without a name")
        self.stack.append(self.resolve(module, name))

    def do_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if not isinstance(function, Function) or not isinstance(arguments, tuple):
            raise UnsafePickleError(f"calls {described(function)}")
        self.stack[-1] = function.call(arguments)

    def do_newobj(self) -> None:
        arguments = self.stack.pop()
        cls = self.stack[-1]
        if not isinstance(cls, RecordClass) or arguments != ():
            raise UnsafePickleError(f"makes an object of {described(cls)} with arguments")
        self.stack[-1] = Record(cls.name)

    def do_build(self) -> None:
        state = self.stack.pop()
        record = self.stack[-1]
        if not isinstance(record, Record):
            raise UnsafePickleError(f"sets the state of a {type(record).__name__}")
        record.state = state

    def do_memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def do_put(self, width: int) -> None:
        self.memo[self.number(width)] = self.stack[-1]

    def do_get1(self) -> None:
        self.stack.append(self.memo[self.data[self.at]])
        self.at += 1

    def do_get4(self) -> None:
        self.stack.append(self.memo[_U32.unpack_from(self.data, self.at)[0]])
        self.at += 4


def described(value: object) -> str:
    """What a value is, for messages. Not its `repr`: a few bytes may make a value whose text would never end."""
    if isinstance(value, (Record, RecordClass, Function)):
        return value.name
    return f"a {type(value).__name__}"


def _list(value: object) -> list[Any]:
    if type(value) is not list:
        raise TypeError("appends to what is no list")
    return value


def _dict(value: object) -> dict[Any, Any]:
    if type(value) is not dict:
        raise TypeError("sets an item of what is no dict")
    return value


def _key(value: object) -> Any:
    if type(value) in {str, int} or isinstance(value, Record):
        return value
    raise TypeError(f"a {type(value).__name__} as key of a dict")


def _refuse(opcode: int) -> Callable[[_Machine], None]:
    def handler(_: _Machine) -> None:
        if opcode in _UNSAFE:
            raise UnsafePickleError(f"uses the opcode {_UNSAFE[opcode]}")
        raise ValueError(f"{opcode:#x} is not an opcode that plain data needs")

    return handler


_STOP = ord(".")
_UNSAFE = {
    ord("i"): "INST", ord("o"): "OBJ", ord("P"): "PERSID", ord("Q"): "BINPERSID", 0x92: "NEWOBJ_EX",
    0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", 0x97: "NEXT_BUFFER",
}  # fmt: skip
_HANDLERS: list[Callable[[_Machine], None]] = [_refuse(opcode) for opcode in range(256)]
for _opcode, _handler in {
    0x80: _Machine.do_proto,
    0x95: _Machine.do_frame,
    ord("("): _Machine.do_mark,
    ord("0"): _Machine.do_pop,
    ord("1"): _Machine.do_pop_mark,
    ord("2"): lambda machine: machine.stack.append(machine.stack[-1]),
    ord("N"): lambda machine: machine.stack.append(None),
    0x88: lambda machine: machine.stack.append(True),
    0x89: lambda machine: machine.stack.append(False),
    ord("J"): _Machine.do_binint,
    ord("K"): _Machine.do_binint1,
    ord("M"): _Machine.do_binint2,
    0x8A: _Machine.do_long1,
    0x8B: _Machine.do_long4,
    0x8C: lambda machine: machine.do_unicode(1),
    ord("X"): lambda machine: machine.do_unicode(4),
    0x8D: lambda machine: machine.do_unicode(8),
    ord("C"): lambda machine: machine.do_bytes(1),
    ord("B"): lambda machine: machine.do_bytes(4),
    0x8E: lambda machine: machine.do_bytes(8),
    ord(")"): lambda machine: machine.stack.append(()),
    0x85: lambda machine: machine.do_tuple_of(1),
    0x86: lambda machine: machine.do_tuple_of(2),
    0x87: lambda machine: machine.do_tuple_of(3),
    ord("t"): _Machine.do_tuple,
    ord("]"): lambda machine: machine.stack.append([]),
    ord("}"): lambda machine: machine.stack.append({}),
    ord("a"): _Machine.do_append,
    ord("e"): _Machine.do_appends,
    ord("s"): _Machine.do_setitem,
    ord("u"): _Machine.do_setitems,
    ord("c"): _Machine.do_global,
    0x93: _Machine.do_stack_global,
    ord("R"): _Machine.do_reduce,
    0x81: _Machine.do_newobj,
    ord("b"): _Machine.do_build,
    0x94: _Machine.do_memoize,
    ord("q"): lambda machine: machine.do_put(1),
    ord("r"): lambda machine: machine.do_put(4),
    ord("h"): _Machine.do_get1,
    ord("j"): _Machine.do_get4,
}.items():
    _HANDLERS[_opcode] = _handler
