"""Pickles as trees that can be changed: what real values are pickled to, with other arguments in some places.

A change of bytes hardly ever gives a pickle that calls an allowed function with arguments that nearly fit. Here a
value's pickle becomes a tree of calls, states, containers and numbers; a part of it is replaced by another one, and the
tree becomes a pickle again.
"""

from __future__ import annotations

import pickletools
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_core.objects.allowed_globals import default_globals
from dcp_manifest.pickles.pickle_table import python3_name

__all__ = ["Node", "changed", "nodes", "pickle_of_tree", "tree_of"]

_EDGES = (
    *(0, 1, -1, 2, 7, 63, 64, 65, 255, 623, 625, 1 << 15, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 40, 1 << 62),
    *(-(1 << 63), (1 << 63) - 1, 1 << 64, 1 << 70, 1 << 5000),
    *(
        "",
        "0",
        "1",
        "cpu",
        "cuda:0",
        "meta",
        "<",
        "|",
        "f4",
        "O",
        "O8",
        "V3",
        "V999999999",
        "S0",
        "U1",
        "M8[ns]",
        "b",
        "T",
    ),
    *("storage", "latin1", "utf-8", "zlib", "x", "1e999999999", "9" * 5000, "int", "__class__", "data", "detach"),
    *(b"", b"b", b"A" * 8, bytes(64), b"\xff" * 64, b"\x80\x02N.", 0.0, -1.5, 1e300, float("nan"), None, True, False),
)
_NAMES = sorted(default_globals())


@dataclass(eq=False)
class Node:
    """An opcode that makes a value of other values."""

    kind: str
    """`value`, `name`, `tuple`, `list`, `dict`, `set`, `frozenset`, `call`, `new`, `build`, `fill`, or `storage`."""
    value: Any = None
    parts: list[Node] = field(default_factory=list)


def tree_of(pickled: bytes) -> Node:
    """The tree of a pickle of protocol 2 or 4."""
    builder = _Builder()
    for opcode, argument, _ in pickletools.genops(pickled):
        builder.read(opcode.name, argument)
    (tree,) = builder.stack
    return tree


class _Builder:
    """The stack of a pickle while it becomes a tree."""

    def __init__(self) -> None:
        self.stack: list[Node] = []
        self._memo: dict[int, Node] = {}

    def read(self, name: str, argument: Any) -> None:
        """Take the next opcode."""
        if name in _READERS:
            _READERS[name](self, argument)
        elif name not in ("PROTO", "FRAME", "STOP"):
            self.stack.append(Node("value", {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}.get(name, argument)))

    def last(self, count: int) -> list[Node]:
        """Take so many nodes off the stack."""
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def since_mark(self) -> list[Node]:
        """Take the nodes after the last mark off the stack, and the mark."""
        return self.last([node.kind for node in reversed(self.stack)].index("mark") + 1)[1:]

    def make(self, kind: str, parts: list[Node]) -> None:
        """Push a node."""
        self.stack.append(Node(kind, None, parts))

    def fill(self, kind: str, items: list[Node]) -> None:
        """Put items into the container on top of the stack."""
        self.stack[-1].parts.append(Node(kind, None, items))

    def put(self, place: int | None) -> None:
        """Remember the top of the stack."""
        self._memo[len(self._memo) if place is None else place] = self.stack[-1]

    def get(self, place: int) -> None:
        """Push what was remembered."""
        self.stack.append(self._memo[place])

    def name(self, module: str, name: str) -> None:
        """Push a global."""
        self.stack.append(Node("name", python3_name(module, name)))


_READERS: dict[str, Callable[[_Builder, Any], None]] = {
    "MARK": lambda builder, _: builder.make("mark", []),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Builder.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Builder.get),
    "GLOBAL": lambda builder, argument: builder.name(*argument.split(" ")),
    "STACK_GLOBAL": lambda builder, _: builder.name(*(node.value for node in builder.last(2))),
    "REDUCE": lambda builder, _: builder.make("call", builder.last(2)),
    "NEWOBJ": lambda builder, _: builder.make("new", builder.last(2)),
    "BUILD": lambda builder, _: builder.make("build", builder.last(2)),
    "BINPERSID": lambda builder, _: builder.make("storage", builder.last(1)),
    "EMPTY_TUPLE": lambda builder, _: builder.make("tuple", []),
    "EMPTY_LIST": lambda builder, _: builder.make("list", []),
    "EMPTY_DICT": lambda builder, _: builder.make("dict", []),
    "EMPTY_SET": lambda builder, _: builder.make("set", []),
    "TUPLE1": lambda builder, _: builder.make("tuple", builder.last(1)),
    "TUPLE2": lambda builder, _: builder.make("tuple", builder.last(2)),
    "TUPLE3": lambda builder, _: builder.make("tuple", builder.last(3)),
    "TUPLE": lambda builder, _: builder.make("tuple", builder.since_mark()),
    "FROZENSET": lambda builder, _: builder.make("frozenset", builder.since_mark()),
    "APPEND": lambda builder, _: builder.fill("APPENDS", builder.last(1)),
    "SETITEM": lambda builder, _: builder.fill("SETITEMS", builder.last(2)),
    "APPENDS": lambda builder, _: builder.fill("APPENDS", builder.since_mark()),
    "SETITEMS": lambda builder, _: builder.fill("SETITEMS", builder.since_mark()),
    "ADDITEMS": lambda builder, _: builder.fill("ADDITEMS", builder.since_mark()),
}


def nodes(tree: Node) -> list[Node]:
    """Every node of a tree, once."""
    found, seen, todo = [], set[int](), [tree]
    while todo:
        node = todo.pop()
        if id(node) not in seen:
            seen.add(id(node))
            found.append(node)
            todo += node.parts
    return found


def _copied(node: Node, made: dict[int, Node]) -> Node:
    if id(node) not in made:
        copy = made[id(node)] = Node(node.kind, node.value)
        copy.parts = [_copied(part, made) for part in node.parts]
    return made[id(node)]


def changed(tree: Node, others: Sequence[Node], rng: random.Random) -> Node:
    """A copy of a tree with one to four changes.

    Args:
        tree: The tree.
        others: Trees of which parts may be put into it.
        rng: Chooses.
    """
    copy = _copied(tree, {})
    for _ in range(rng.randint(1, 4)):
        _change(rng.choice(nodes(copy)), others, rng)
    return copy


def _change(node: Node, others: Sequence[Node], rng: random.Random) -> None:
    kind = rng.randrange(8)
    if kind == 0 or (node.kind == "value" and kind < 4):
        _become(node, Node("value", rng.choice(_EDGES)))
    elif kind == 1:
        _become(node, _copied(rng.choice(nodes(rng.choice(others))), {}))
    elif kind == 2:
        _become(node, Node("name", rng.choice(_NAMES)))
    elif kind in (3, 4) and node.parts:
        part = rng.choice(node.parts)
        (node.parts.remove if kind == 3 else node.parts.append)(part)
    else:
        _wrap(node, rng)


def _wrap(node: Node, rng: random.Random) -> None:
    """Put a node into pairs of itself, or make it an argument, or do another thing with its parts."""
    inner = Node(node.kind, node.value, node.parts)
    kind = rng.randrange(3)
    if kind == 0:
        for _ in range(rng.choice((1, 1, 3, 40))):
            inner = Node("tuple", None, [inner, inner])
        _become(node, inner)
    elif kind == 1:
        arguments = Node("tuple", None, [inner, *(Node("value", rng.choice(_EDGES)) for _ in range(rng.randrange(3)))])
        _become(node, Node(rng.choice(("call", "new", "build")), None, [Node("name", rng.choice(_NAMES)), arguments]))
    elif node.kind in ("call", "new", "build"):
        node.kind = rng.choice(("call", "new", "build"))
    elif type(node.value) is int:
        node.value = node.value * rng.choice((2, -1, 1 << 20)) + rng.choice((-1, 0, 1))


def _become(node: Node, other: Node) -> None:
    node.kind, node.value, node.parts = other.kind, other.value, other.parts


def pickle_of_tree(tree: Node) -> bytes:
    """The pickle of a tree, protocol 4; what is in several places of it is shared."""
    return b"\x80\x04" + b"".join(_opcodes(tree, {}, [0])) + b"."


def _opcodes(node: Node, known: dict[int, bytes], budget: list[int]) -> Iterator[bytes]:
    if id(node) in known:
        yield known[id(node)]
        return
    budget[0] += 1
    if budget[0] > 3000:  # a tree within itself
        yield b"N"
        return
    yield from _MAKERS.get(node.kind, _fill)(node, known, budget)
    if node.kind in ("APPENDS", "SETITEMS", "ADDITEMS"):
        return
    place = len(known)
    known[id(node)] = b"j" + struct.pack("<I", place)
    yield b"r" + struct.pack("<I", place)
    for part in node.parts:
        if part.kind in ("APPENDS", "SETITEMS", "ADDITEMS"):
            yield from _opcodes(part, known, budget)


Maker = Callable[[Node, dict[int, bytes], list[int]], Iterator[bytes]]


def _scalar(node: Node, _: dict[int, bytes], __: list[int]) -> Iterator[bytes]:
    value = node.value
    if value is None or type(value) is bool:
        yield {None: b"N", True: b"\x88", False: b"\x89"}[value]
    elif type(value) is int:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        yield b"\x8b" + struct.pack("<I", len(data)) + data
    elif type(value) is float:
        yield b"G" + struct.pack(">d", value)
    else:
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        yield (b"X" if isinstance(value, str) else b"B") + struct.pack("<I", len(data)) + data


def _name(node: Node, known: dict[int, bytes], budget: list[int]) -> Iterator[bytes]:
    for part in node.value.rpartition(".")[::2]:
        yield from _scalar(Node("value", part), known, budget)
    yield b"\x93"


def _pair(opcode: bytes) -> Maker:
    def make(node: Node, known: dict[int, bytes], budget: list[int]) -> Iterator[bytes]:
        for part in [*node.parts[:2], *[Node("tuple")] * (2 - len(node.parts))]:
            yield from _opcodes(part, known, budget)
        yield opcode

    return make


def _items(opcode: bytes) -> Maker:
    def make(node: Node, known: dict[int, bytes], budget: list[int]) -> Iterator[bytes]:
        yield b"("
        for part in node.parts:
            yield from _opcodes(part, known, budget)
        yield opcode

    return make


def _persistent(node: Node, known: dict[int, bytes], budget: list[int]) -> Iterator[bytes]:
    yield from _opcodes(node.parts[0] if node.parts else Node("tuple"), known, budget)
    yield b"Q"


def _fill(node: Node, _: dict[int, bytes], __: list[int]) -> Iterator[bytes]:
    yield {"list": b"]", "dict": b"}", "set": b"\x8f"}[node.kind]


_MAKERS: dict[str, Maker] = {
    "value": _scalar, "name": _name, "tuple": _items(b"t"), "frozenset": _items(b"\x91"), "call": _pair(b"R"),
    "new": _pair(b"\x81"), "build": _pair(b"b"), "storage": _persistent, "APPENDS": _items(b"e"),
    "SETITEMS": _items(b"u"), "ADDITEMS": _items(b"\x90"),
}  # fmt: skip
