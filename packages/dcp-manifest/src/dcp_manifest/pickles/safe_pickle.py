"""Safe pickle reader, the only reader of pickles from checkpoints: it makes only the calls in an allow-table.

Names are never imported. State and items are added only to types in the table. Memory and work are bounded by a
constant multiple of the pickle's length.
"""

from __future__ import annotations

import argparse
import collections
import struct
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from dcp_manifest.pickles.pickle_table import (
    SCALAR_OPCODES,
    Budget,
    Function,
    Opaque,
    PickleTable,
    Record,
    RecordClass,
    ScalarReader,
    UnsafePickleError,
    described,
    python3_name,
)

_U32 = struct.Struct("<I")


def read_pickle(
    data: bytes,
    table: PickleTable,
    *,
    start: int = 0,
    budget: Budget | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> tuple[Any, int]:
    """Read the pickle that begins at `start`; return its value and the offset of its end.

    `budget` limits the calls' work, by default that of `data`. `persistent` returns the value of a
    persistent id; without it, persistent ids are refused.

    Raises:
        UnsafePickleError: The table does not allow a global, call or opcode.
        ValueError: The bytes are not a pickle, or a call in it failed; the message has the offset.
    """
    machine = _Machine(data, start, table, Budget(len(data)) if budget is None else budget, persistent)
    try:
        return machine.run(), machine.at
    except (UnsafePickleError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{str(error) or type(error).__name__} (offset {machine.at})") from error


class _Machine(ScalarReader):
    __slots__ = ("below", "budget", "drafts", "memo", "persistent", "proto", "table")

    def __init__(
        self, data: bytes, at: int, table: PickleTable, budget: Budget, persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(data, at)
        self.table = table
        self.budget = budget
        self.persistent = persistent
        self.proto = 0
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        # id of a value that its state may replace → the value, and its memo slots
        self.drafts: dict[int, tuple[Any, list[int]]] = {}

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

    def since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.below.pop()
        return items

    def do_proto(self) -> None:
        self.proto = self.number(1)
        if self.proto > 5:
            raise ValueError("the pickle's protocol is newer than 5")

    def do_mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def do_pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def do_tuple(self) -> None:
        items = self.since_mark()
        self.stack.append(tuple(items))

    def do_tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError("the stack is too short")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    def do_list(self) -> None:
        items = self.since_mark()
        self.stack.append(items)

    def do_dict(self) -> None:
        items, target = self.since_mark(), dict[Any, Any]()
        self.stack.append(target)
        self.put_pairs(target, items)

    def do_frozenset(self) -> None:
        items = self.since_mark()
        self.budget.admit_keys(items)
        self.stack.append(frozenset(items))

    def do_append(self) -> None:
        value = self.stack.pop()
        self.put_items([value])

    def do_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self.put_pairs(self.take_items(self.table.dicts), [key, value])

    def do_setitems(self) -> None:
        items = self.since_mark()
        self.put_pairs(self.take_items(self.table.dicts), items)

    def do_additems(self) -> None:
        items = self.since_mark()
        target = self.take_items(self.table.sets)
        for item in items:
            self.budget.admit_key(target, item)
        target.update(items)

    def take_items(self, types: frozenset[type]) -> Any:
        target = self.stack[-1]
        if type(target) not in types and type(target) is not Opaque:
            raise TypeError(f"items for {described(target)} are not allowed")
        return target

    def put_items(self, items: list[Any]) -> None:
        target = self.take_items(self.table.lists)
        target.extend(items)
        if type(target) is not list:
            self.budget.nest(target, items)

    def put_pairs(self, target: Any, items: list[Any]) -> None:
        admit_key = self.budget.admit_key
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                admit_key(target, key)
            target[key] = value
        if type(target) is not dict:
            self.budget.nest(target, items[1::2])

    def do_global(self) -> None:
        module = self.line().decode("utf-8")
        self.find(module, self.line().decode("utf-8"))

    def do_stack_global(self) -> None:
        name = self.stack.pop()
        module = self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("a global has no name")
        self.find(module, name)

    def find(self, module: str, name: str) -> None:
        self.budget.spend(len(module) + len(name))
        if self.table.complete is not None:
            self.table = self.table.complete()
        self.stack.append(self.table.find(python3_name(module, name) if self.proto < 3 else f"{module}.{name}"))

    def do_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if type(function) is Opaque:
            return
        call = function.call if type(function) is Function else self.table.calls.get(id(function))
        if call is None:
            raise UnsafePickleError(f"a call of {described(function)} is not allowed")
        if type(arguments) is not tuple:
            raise TypeError("a call without a tuple of arguments")
        self.put_made(call(self.budget, arguments))

    def do_newobj(self) -> None:
        arguments = self.stack.pop()
        cls = self.stack[-1]
        if type(cls) is RecordClass and arguments == ():
            self.stack[-1] = Record(cls.name)
        elif type(arguments) is tuple and id(cls) in self.table.news:
            self.put_made(self.table.news[id(cls)](self.budget, arguments, {}))
        else:
            self.stack.append(arguments)
            self.do_reduce()

    def do_newobj_ex(self) -> None:
        named = self.stack.pop()
        arguments = self.stack.pop()
        if type(self.stack[-1]) is Opaque:
            return
        new = self.table.news.get(id(self.stack[-1]))
        if new is None or type(named) is not dict or type(arguments) is not tuple:
            raise UnsafePickleError(f"a call of {described(self.stack[-1])} by NEWOBJ_EX is not allowed")
        self.put_made(new(self.budget, arguments, named))

    def put_made(self, made: Any) -> None:
        self.stack[-1] = made
        if type(made) in self.table.drafts:
            self.drafts[id(made)] = made, []

    def do_build(self) -> None:
        state = self.stack.pop()
        instance = self.stack[-1]
        if type(instance) is Record:
            instance.state = state
            return
        if type(instance) is Opaque:
            return
        build = self.table.states.get(type(instance))
        if build is None:
            raise UnsafePickleError(f"a state for {described(instance)} is not allowed")
        built = build(self.budget, instance, state)
        if built is not instance:
            _, places = self.drafts.pop(id(instance))
            self.stack[-1] = built
            self.memo.update(dict.fromkeys(places, built))

    def do_persistent_id(self) -> None:
        if self.persistent is None:
            raise UnsafePickleError("uses the opcode BINPERSID")
        pid = self.stack.pop()
        self.stack.append(self.persistent(pid))

    def put(self, place: int) -> None:
        value = self.memo[place] = self.stack[-1]
        if self.drafts and id(value) in self.drafts:
            self.drafts[id(value)][1].append(place)

    def do_put1(self) -> None:
        value = self.memo[self.data[self.at]] = self.stack[-1]
        if self.drafts and id(value) in self.drafts:
            self.drafts[id(value)][1].append(self.data[self.at])
        self.at += 1

    def do_get1(self) -> None:
        self.stack.append(self.memo[self.data[self.at]])
        self.at += 1

    def do_get4(self) -> None:
        self.stack.append(self.memo[_U32.unpack_from(self.data, self.at)[0]])
        self.at += 4


def _refuse(opcode: int) -> Callable[[_Machine], None]:
    def handler(_: _Machine) -> None:
        if opcode in _UNSAFE:
            raise UnsafePickleError(f"uses the opcode {_UNSAFE[opcode]}")
        raise ValueError(f"{opcode:#x} is not an opcode that plain data needs")

    return handler


_STOP = ord(".")
_UNSAFE = {
    ord("i"): "INST", ord("o"): "OBJ", ord("P"): "PERSID", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4",
    0x97: "NEXT_BUFFER",
}  # fmt: skip
_HANDLERS: list[Callable[[_Machine], object]] = [_refuse(opcode) for opcode in range(256)]
for _opcode, _handler in {
    **SCALAR_OPCODES,
    0x80: _Machine.do_proto,
    0x95: lambda machine: machine.number(8),
    ord("("): _Machine.do_mark,
    ord("0"): _Machine.do_pop,
    ord("1"): lambda machine: machine.since_mark(),
    ord("2"): lambda machine: machine.stack.append(machine.stack[-1]),
    0x85: lambda machine: machine.do_tuple_of(1),
    0x86: lambda machine: machine.do_tuple_of(2),
    0x87: lambda machine: machine.do_tuple_of(3),
    ord("t"): _Machine.do_tuple,
    ord("l"): _Machine.do_list,
    ord("d"): _Machine.do_dict,
    0x91: _Machine.do_frozenset,
    ord("a"): _Machine.do_append,
    ord("e"): lambda machine: machine.put_items(machine.since_mark()),
    ord("s"): _Machine.do_setitem,
    ord("u"): _Machine.do_setitems,
    0x90: _Machine.do_additems,
    ord("c"): _Machine.do_global,
    0x93: _Machine.do_stack_global,
    ord("R"): _Machine.do_reduce,
    0x81: _Machine.do_newobj,
    0x92: _Machine.do_newobj_ex,
    ord("b"): _Machine.do_build,
    ord("Q"): _Machine.do_persistent_id,
    0x94: lambda machine: machine.put(len(machine.memo)),
    ord("q"): _Machine.do_put1,
    ord("r"): lambda machine: machine.put(machine.number(4)),
    ord("p"): lambda machine: machine.put(machine.decimal()),
    ord("h"): _Machine.do_get1,
    ord("j"): _Machine.do_get4,
    ord("g"): lambda machine: machine.stack.append(machine.memo[machine.decimal()]),
}.items():
    _HANDLERS[_opcode] = _handler

_LEAVES = frozenset((str, int, float, bool, bytes, type(None)))
_SEQUENCES = frozenset((list, tuple, set, frozenset, collections.deque))
_MAPPINGS = frozenset((dict, collections.OrderedDict, collections.defaultdict, collections.Counter))
_NAMESPACES = frozenset((argparse.Namespace, types.SimpleNamespace))
# Ordinary values are shared up to a thousand times; a doubling value exceeds this after a few dozen bytes.
_FREE = 50_000_000
_PER_BYTE = 1000


def refuse_unfolding(value: object, nbytes: int) -> None:
    """Raise UnsafePickleError if an object's unfolded size is far larger than its stored `nbytes`.

    No other thread may use `value` during the call.
    """
    if _parts(value):
        _count(value, _FREE + _PER_BYTE * nbytes)


def _count(value: object, most: int) -> int:
    """Shared parts count for each place, cycles once."""
    sizes: dict[int, int] = {id(value): 1}
    path: list[tuple[object, Iterator[Any], int]] = []
    owner, parts, size = value, iter(_parts(value)), 1
    while True:
        for part in parts:
            if type(part) in _LEAVES:
                size += 1
                continue
            known = sizes.get(id(part))
            below = _parts(part) if known is None else ()
            if not below:
                size += known or 1
                continue
            sizes[id(part)] = 1
            path.append((owner, parts, size))
            owner, parts, size = part, iter(below), 1
            break
        else:
            sizes[id(owner)] = size
            if size > most:
                raise UnsafePickleError("a value whose parts are shared too often to be printed is not allowed")
            if not path:
                return size
            below_size = size
            owner, parts, size = path.pop()
            size += below_size


def _parts(value: object) -> Collection[Any]:
    kind = type(value)
    if kind in _SEQUENCES:
        return value  # type: ignore[return-value]
    if kind in _MAPPINGS:
        return [*value.keys(), *value.values()]  # type: ignore[attr-defined]
    if kind in _NAMESPACES:
        return list(vars(value).values())
    if kind is np.ndarray and value.dtype.hasobject:  # type: ignore[attr-defined]
        return value.ravel().tolist()  # type: ignore[attr-defined, no-any-return]
    return ()
