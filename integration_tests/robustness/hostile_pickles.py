"""Pickles that would harm whoever loads them with `pickle`: each would create a file, or take all memory."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping

__all__ = ["BOMBS", "CODE"]

PROTO = b"\x80\x04"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return named(module, name) + b"(" + b"".join(arguments) + b"tR"


def command(marker: str) -> bytes:
    return text(f"touch {marker}")


def expression(marker: str) -> bytes:
    return text(f"open({marker!r}, 'w')")


def whole(body: bytes) -> bytes:
    return PROTO + body + b"."


class _Reduces:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (self.marker, "w")


def nested(marker: str) -> bytes:
    """The call that harms is the argument of a harmless one, inside a tuple of a list of a dict."""
    inner = pickle.dumps([{"a": (1, _Reduces(marker))}])
    return call("builtins", "list", b"(" + inner[2:-1] + b"t")


def loads(module: str) -> Callable[[str], bytes]:
    """A pickle in a pickle."""

    def make(marker: str) -> bytes:
        inner = pickle.dumps(_Reduces(marker), protocol=2)
        return call(module, "loads", b"B" + struct.pack("<I", len(inner)) + inner)

    return make


def state_into(module: str, name: str, state: bytes) -> bytes:
    """`__setstate__`, or attributes, of an object made without its constructor."""
    return named(module, name) + b")\x81" + state + b"b"


# Name → body of a pickle that creates the marker file when it is loaded without restrictions, or is made to.
CODE: Mapping[str, Callable[[str], bytes]] = {
    "os.system": lambda marker: call("os", "system", command(marker)),
    "posix.system": lambda marker: call("posix", "system", command(marker)),
    "os.popen": lambda marker: call("os", "popen", command(marker)),
    "subprocess": lambda marker: call("subprocess", "check_call", b"(" + text("touch") + text(marker) + b"l"),
    "eval": lambda marker: call("builtins", "eval", expression(marker)),
    "exec": lambda marker: call("builtins", "exec", expression(marker)),
    "python 2 names": lambda marker: call("__builtin__", "eval", expression(marker)),
    "open": lambda marker: call("io", "open", text(marker), text("w")),
    "pathlib": lambda marker: call("pathlib", "Path.touch", call("pathlib", "Path", text(marker))),
    "dotted name": lambda marker: call("torch", "os.system", command(marker)),
    "dotted name of a class": lambda marker: call("torch", "storage.io.open", text(marker), text("w")),
    "getattr": lambda marker: (
        call("builtins", "getattr", named("os", "path"), text("os")) + b"0" + call("os", "system", command(marker))
    ),
    "getattr of what is allowed": lambda marker: (
        call("builtins", "getattr", named("torch", "Tensor"), text("__init_subclass__"))
        + b"0"
        + call("builtins", "eval", expression(marker))
    ),
    "attrgetter": lambda marker: (
        named("operator", "attrgetter")
        + b"("
        + text("system")
        + b"tR("
        + named("os", "path")
        + b"tR"
        + b"0"
        + call("os", "system", command(marker))
    ),
    "partial": lambda marker: call("functools", "partial", named("os", "system"), command(marker)) + b")R",
    "import": lambda marker: call("builtins", "__import__", text("os")) + b"0" + call("os", "system", command(marker)),
    "apply": lambda marker: call("builtins", "map", named("os", "system"), b"(" + command(marker) + b"l"),
    "nested reduce": nested,
    "pickle.loads": loads("pickle"),
    "_pickle.loads": loads("_pickle"),
    "torch.load": lambda marker: call("torch", "load", text(marker)) + b"0" + loads("pickle")(marker),
    "rebuild from type": lambda marker: call(
        "torch._tensor", "_rebuild_from_type_v2", named("os", "system"), command(marker), b")", b"}"
    ),
    "INST": lambda marker: b"(" + command(marker) + b"ios\nsystem\n",
    "OBJ": lambda marker: b"(" + named("os", "system") + command(marker) + b"o",
    "NEWOBJ": lambda marker: named("subprocess", "Popen") + b"(" + command(marker) + b"t\x81",
    "NEWOBJ_EX": lambda marker: named("subprocess", "Popen") + b")" + b"}" + text("args") + command(marker) + b"s\x92",
    "GLOBAL": lambda marker: b"cos\nsystem\n(" + command(marker) + b"tR",
    "BUILD of a class": lambda marker: named("torch", "Size") + b"}" + text("__reduce__") + expression(marker) + b"sb",
    "BUILD of a function": lambda marker: (
        named("torch._utils", "_rebuild_tensor_v2") + b"}" + text("__code__") + expression(marker) + b"sb"
    ),
    "BUILD with __setstate__": lambda marker: (
        state_into("collections", "OrderedDict", b"}" + text("__setstate__") + named("os", "system") + b"s")
        + command(marker)
        + b"b"
    ),
    "BUILD of a record": lambda marker: (
        state_into(
            "torch.distributed.checkpoint.metadata",
            "Metadata",
            b"}" + text("__setstate__") + named("os", "system") + b"s",
        )
        + command(marker)
        + b"b"
    ),
    "extension code": lambda marker: b"\x82\x01(" + command(marker) + b"tR",
    "persistent id": lambda marker: b"(" + text("module") + named("os", "system") + command(marker) + b"tQ",
}


def doubling(times: int) -> bytes:
    """Lists of the list before, twice each: printed or copied, they fill any memory."""
    return b"]\x94" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(times))


# Name → body of a pickle that asks for more than there is.
BOMBS: Mapping[str, bytes] = {
    "deep lists": b"]" * 100_000 + b"a" * 99_999,
    "deep tuples": b")" + b"\x85" * 200_000,
    "deep dicts": b"}" + b"".join(b"N}" for _ in range(50_000)) + b"s" * 50_000,
    "deep tuple as a key": b"}" + b")" + b"\x85" * 200_000 + b"Ns",
    "deep marks": b"(" * 100_000 + b"t" * 100_000,
    "doubling": doubling(60),
    "huge text": b"X" + struct.pack("<I", 0xFFFFFFF0) + b"abc",
    "huge text of 8 bytes": b"\x8d" + struct.pack("<Q", 1 << 62) + b"abc",
    "huge bytes": b"\x8e" + struct.pack("<Q", 1 << 40) + b"abc",
    "huge bytearray": b"\x96" + struct.pack("<Q", 1 << 40) + b"abc",
    "huge integer": b"\x8b" + struct.pack("<I", 0x7FFFFFF0) + b"abc",
    "long integer": b"\x8b" + struct.pack("<I", 4 << 20) + b"\xff" * (4 << 20),
    "negative length": b"\x8b" + struct.pack("<i", -1) + b"abc",
    "huge frame": b"\x95" + struct.pack("<Q", 1 << 60) + b"N",
    "huge memo": b"Nr" + struct.pack("<I", 0xFFFFFFF0),
    "memo that is not there": b"j" + struct.pack("<I", 0xFFFFFFF0),
    "range": call("builtins", "list", call("builtins", "range", b"\x8a\x06" + (1 << 40).to_bytes(6, "little"))),
    "bytes of a number": call("builtins", "bytearray", b"\x8a\x06" + (1 << 40).to_bytes(6, "little")),
    "power": call("builtins", "pow", b"K\x07", b"\x8a\x05" + (1 << 33).to_bytes(5, "little")),
    "nothing": b"",
    "only marks": b"((((",
    "empty stack": b"0000",
    "newer protocol": b"\x80\xff",
}
