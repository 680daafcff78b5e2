"""Objects that would take far more memory, or time, than they have bytes: refused before anything is made."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import fractions
import io
import pickle
from typing import Any

import numpy as np
import pytest

from dcp_core.errors import CorruptCheckpointError, UnsafeCheckpointError
from dcp_core.objects.allowed_globals import default_table
from dcp_core.objects.object_bytes import load_object
from dcp_manifest.pickles.pickle_table import UnsafePickleError
from dcp_manifest.pickles.safe_pickle import read_pickle
from integration_tests.kits.crafted_objects import Call, archived

HUGE = 1 << 36


def load(data: bytes) -> Any:
    return read_pickle(data, default_table())[0]


BOMBS = {
    "bytes": Call(bytes, HUGE),
    "bytearray": Call(bytearray, HUGE),
    **{
        f"{kind.__name__} of a range": Call(kind, Call(range, HUGE))
        for kind in (list, tuple, set, frozenset, collections.deque, collections.Counter, dict, str)
    },
    "numpy of a range": Call(np.float64, Call(range, HUGE)),
    "fraction": Call(fractions.Fraction, "1e999999999"),
    "fraction of a decimal": Call(fractions.Fraction, Call(decimal.Decimal, "1E+999999999")),
    "integer of a decimal": Call(int, Call(decimal.Decimal, "1e999999999")),
    "numpy of a decimal": Call(np.int64, Call(decimal.Decimal, "1e999999999")),
}


@pytest.mark.parametrize("name", BOMBS)
def test_much_of_little_is_refused(name: str) -> None:
    with pytest.raises(UnsafePickleError, match="not allowed"):
        load(pickle.dumps(BOMBS[name]))


def test_copies_of_copies_are_refused() -> None:
    """Each call is harmless; a thousand copies of a long list are not."""
    long = [*range(20_000)]
    with pytest.raises(UnsafePickleError, match="more memory or work"):
        load(pickle.dumps([Call(tuple, long) for _ in range(1000)]))


def test_what_values_need_is_allowed() -> None:
    values = [
        set(range(50_000)), frozenset("abc"), collections.Counter("aab"), collections.deque(range(9), 5),
        collections.OrderedDict(a=1), collections.defaultdict(list, {"a": [1]}), bytearray(b"x" * 100_000), range(HUGE),
        fractions.Fraction(1, 3), decimal.Decimal("1E+99999"), np.float32(3.5), np.arange(3), 1 << 4000,
        b"b" * 3_000_000,
    ]  # fmt: skip
    for protocol in (2, 4):
        for value, found in zip(values, load(pickle.dumps(values, protocol)), strict=True):
            assert type(found) is type(value)
            assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value


def test_a_length_is_not_believed() -> None:
    with pytest.raises(ValueError, match="truncated"):
        load(b"\x80\x05\x96" + (1 << 34).to_bytes(8, "little") + b"abc.")
    assert load(pickle.dumps(bytearray(b"abc" * 99), protocol=5)) == bytearray(b"abc" * 99)


def laughs(times: int, opcode: bytes = b"\x86") -> bytes:
    """A value of a value, twice each: as many parts as two to the power of `times`."""
    return b"X\1\0\0\0aq\0" + b"".join(b"h" + bytes([n]) + b"2" + opcode + b"q" + bytes([n + 1]) for n in range(times))


def frozen_laughs(times: int, first: bytes) -> bytes:
    """Sets of pairs of sets …, made anew so that comparing two of them never ends."""
    made = b"(" + first + b"\x91"
    for _ in range(times):
        made = b"(" + made + b"q\0N\x86h\0K\1\x86\x91"
    return made


def again(name: str, arguments: bytes) -> bytes:
    """A call with the same arguments ten thousand times."""
    module, _, called = name.rpartition(".")
    named = b"c%b\n%b\n" % ((module or "builtins").encode(), called.encode())
    return arguments + b"q\0" + (named + b"h\0R0") * 9999


CALLED = ("str", "bool", "int", "float", "complex", "bytes", "bytearray", "slice", "range", "frozenset")
ENDLESS = {
    **{f"{name} of laughs": b"cbuiltins\n" + name.encode() + b"\n" + laughs(40) + b"\x85R" for name in CALLED},
    "laughs as a key": b"}" + laughs(40) + b"Ns",
    "laughs in a set": b"\x8f(" + laughs(40) + b"\x90",
    "laughs in a frozenset": b"(" + laughs(40) + b"\x91",
    "laughs as an item of a set": b"cbuiltins\nset\n](" + laughs(40) + b"e\x85R",
    "laughs as the key of a counter": b"ccollections\nCounter\n}" + laughs(40) + b"Ns\x85R",
    "laughs in a UUID": b"}cuuid\nUUID\n)\x81}X\3\0\0\0int" + laughs(40) + b"sbNs",
    "laughs as a number of a fraction": b"cfractions\nFraction\nK\1" + laughs(40) + b"\x86R",
    "laughs as a time zone": b"cdatetime\ntimezone\n" + laughs(40) + b"\x85R",
    "laughs as a path": b"cpathlib\nPurePosixPath\n" + laughs(40) + b"\x85R",
    "laughs as a dtype": b"cnumpy\ndtype\n" + laughs(40) + b"\x85R",
    "laughs as the name of a field": b"cnumpy\ndtype\nX\2\0\0\0V8\x85R(K\3X\1\0\0\0|N" + laughs(40) + b"}NNtb",
    "laughs as an encoding": b"c_codecs\nencode\nX\1\0\0\0a" + laughs(40) + b"\x86R",
    "laughs as a persistent id": laughs(40) + b"Q",
    "laughs as a result": laughs(40),
    "laughs of a list in a namespace": b"cargparse\nNamespace\n)\x81}X\1\0\0\0a" + laughs(40) + b"sb",
    "sets that are compared": b"}(" + frozen_laughs(25, b"K\1") + b"N" + frozen_laughs(25, b"K\1") + b"Nu",
    "many keys of one hash": b"}("
    + b"".join(b"\x8a\x0a" + (number * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for number in range(2, 3000))
    + b"u",
    "a large key, again and again": b"}\x8b\0\0\x10\0" + b"\x01" * (1 << 20) + b"q\0Ns" + b"h\0Ns" * 9999,
    "attributes, again and again": b"cargparse\nNamespace\n)\x81}("
    + b"".join(b"X\4\0\0\0%04xN" % number for number in range(5000))
    + b"uq\0b"
    + b"h\0b" * 5000,
    "bytes, again and again": again("bytearray", b"B\0\0\1\0" + bytes(1 << 16) + b"\x85"),
    "fractions, again and again": again("fractions.Fraction", b"\x8b\0\7\0\0" + b"\x01" * 1792 + b"2\x86"),
    "a number of many digits": b"L" + b"9" * 100_000 + b"L\n",
    "a number from many digits": b"cbuiltins\nint\nX\0\0\1\0" + b"9" * (1 << 16) + b"\x85R",
    "an encoding that unpacks": b"c_codecs\nencode\nX\1\0\0\0aX\4\0\0\0zlib\x86R",
    "names, again and again": b"X\0\0\1\0" + b"a" * (1 << 16) + b"q\0h\0\x93",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_what_would_never_end_is_refused(name: str) -> None:
    """Each in a blink; without a limit each takes minutes, or all memory."""
    with pytest.raises((UnsafeCheckpointError, CorruptCheckpointError)):
        load_object(archived(b"\x80\4" + ENDLESS[name] + b"."), key="k")


def deep(name: str, levels: int) -> bytes:
    start, end = {
        "deque": (b"ccollections\ndeque\n)R", b"a"),
        "defaultdict": (b"ccollections\ndefaultdict\n)RK\1", b"s"),
    }[name]
    return b"\x80\2" + start * levels + b"N" + end * levels + b"."


def inside_out(levels: int) -> bytes:
    """Each is put into the one before while it is empty."""
    made = b"ccollections\ndeque\n)R"
    return b"\x80\2" + made + b"q\0h\0" + (made + b"q\1ah\1") * levels + b"1" * 0 + b"0" * levels + b"."


@pytest.mark.parametrize("name", ["deque", "defaultdict"])
def test_containers_that_are_freed_by_recursion(name: str) -> None:
    """Freeing ten thousands of them ends the process."""
    found = load(deep(name, 40))
    for _ in range(40):
        found = found[0] if name == "deque" else found[1]
    assert found is None
    for levels in (60, 20_000):
        with pytest.raises(UnsafePickleError, match="deep, which is not allowed"):
            load(deep(name, levels))
    with pytest.raises(UnsafePickleError, match="deep, which is not allowed"):
        load(inside_out(20_000))
    many = collections.defaultdict(list, {n: collections.defaultdict(list, a=[n]) for n in range(2500)})
    assert load(pickle.dumps(many)) == many
    cycle = collections.deque([1])
    cycle.append(cycle)
    assert load(pickle.dumps(cycle))[1][0] == 1


INVALID = {
    "datetime": (dt.datetime, b"\x07\xe8\x02\xff\x03\x04\x05\0\0\0"),
    "datetime hour": (dt.datetime, b"\x07\xe8\x02\x01\x63\x04\x05\0\0\0"),
    "date": (dt.date, b"\x07\xe8\x02\x63"),
    "time": (dt.time, b"\x03\x63\x05\0\0\0"),
}


@pytest.mark.parametrize("name", INVALID)
def test_dates_are_what_their_class_allows(name: str) -> None:
    """`datetime` takes any bytes of its pickles."""
    cls, state = INVALID[name]
    assert cls(state) is not None
    with pytest.raises(ValueError, match=r"must be in|out of range"):
        load(pickle.dumps(Call(cls, state)))


def test_streams_come_back() -> None:
    stream, text = io.BytesIO(b"some bytes"), io.StringIO("some\ntext", newline="\n")
    stream.seek(3)
    for protocol in (2, 4):
        found, words = load(pickle.dumps([stream, text], protocol))
        assert (found.tell(), found.getvalue(), words.getvalue()) == (3, b"some bytes", "some\ntext")
    for state in ((b"a", 1 << 40, None), (b"a", 0, {"read": list}), ("a", 0, None), (b"a", -1, None), 7):
        with pytest.raises(UnsafePickleError, match="BytesIO is not allowed"):
            load(pickle.dumps(Call(io.BytesIO, state=state)))
