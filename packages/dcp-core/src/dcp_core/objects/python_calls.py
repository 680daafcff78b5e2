"""Rules for calls of builtin and standard library classes in pickles of stored objects.

Rules check arguments and subtract copies' sizes from a budget, so that no call creates a large or invalid object, or
takes long.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import io
import pathlib
import re
import types
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dcp_manifest.pickles.pickle_table import Budget, Call, Function, New, State, UnsafePickleError, described

_MAX_DIGITS = 4300  # Python's own limit
_MAX_BITS = 14_300  # bits of a number with that many digits
_NONE: type = type(None)
_NUMBERS = frozenset((bool, int, float))
_SCALARS: frozenset[type] = frozenset((bool, int, float, str, _NONE))
_SEQUENCES = frozenset((list, tuple, set, frozenset, dict, collections.deque, str, bytes))
_FRACTION = re.compile(r"-?[0-9]{1,4300}(/[0-9]{1,4300})?")
# Encodings of pickles of protocol 2, and of bytes in strings of Python 2.
_ENCODINGS = ("latin1", "latin-1", "utf-8", "utf8", "ascii")


def refused(what: object, arguments: Iterable[Any]) -> UnsafePickleError:
    """Return the error, which names arguments' types, not contents."""
    given = ", ".join(described(argument) for argument in [*arguments][:6])
    return UnsafePickleError(f"a call of {described(what)} with ({given}) is not allowed")


def _of_kinds(make: Callable[..., Any], most: int, *kinds: type, least: int = 0) -> Call:
    allowed = frozenset(kinds)

    def call(_: Budget, arguments: tuple[Any, ...]) -> Any:
        if not least <= len(arguments) <= most or any(type(argument) not in allowed for argument in arguments):
            raise refused(make, arguments)
        return make(*arguments)

    return call


def _number(make: type) -> Call:
    def call(_: Budget, arguments: tuple[Any, ...]) -> Any:
        text = len(arguments) in (1, 2) and type(arguments[0]) is str and len(arguments[0]) <= _MAX_DIGITS
        if not all(type(argument) in _NUMBERS for argument in arguments[1 if text else 0 :]):
            raise refused(make, arguments)
        return make(*arguments)

    return call


def _decimal(budget: Budget, arguments: tuple[Any, ...]) -> decimal.Decimal:
    if len(arguments) != 1 or type(arguments[0]) is not str:
        raise refused(decimal.Decimal, arguments)
    budget.spend(len(arguments[0]))
    return decimal.Decimal(arguments[0])


def _fraction(budget: Budget, arguments: tuple[Any, ...]) -> fractions.Fraction:
    text = len(arguments) == 1 and type(arguments[0]) is str and _FRACTION.fullmatch(arguments[0])
    pair = len(arguments) == 2 and all(type(part) is int and part.bit_length() <= _MAX_BITS for part in arguments)
    if not text and not pair:
        raise refused(fractions.Fraction, arguments)
    budget.spend(len(arguments[0]) if text else sum(part.bit_length() >> 3 for part in arguments))  # for their gcd
    return fractions.Fraction(*arguments)


def _string(budget: Budget, arguments: tuple[Any, ...]) -> str:
    if arguments and type(arguments[0]) is bytes and len(arguments) == 2 and arguments[1] in _ENCODINGS:
        budget.spend(len(arguments[0]))
        return str(*arguments)
    if len(arguments) > 1 or any(type(argument) not in _SCALARS for argument in arguments):
        raise refused(str, arguments)
    return str(*arguments)


def _encode(budget: Budget, arguments: tuple[Any, ...]) -> bytes:
    if len(arguments) != 2 or type(arguments[0]) is not str or arguments[1] not in _ENCODINGS:
        raise UnsafePickleError("a call of _codecs.encode for anything but bytes is not allowed")
    text, encoding = arguments
    budget.spend(len(text))
    encoded: bytes = text.encode(encoding)
    return encoded


def _buffer(make: type) -> Call:
    def call(budget: Budget, arguments: tuple[Any, ...]) -> Any:
        encoded = len(arguments) == 2 and type(arguments[0]) is str and arguments[1] in _ENCODINGS
        if not encoded and (len(arguments) > 1 or any(type(each) not in (bytes, bytearray) for each in arguments)):
            raise refused(make, arguments)
        budget.spend(sum(map(len, arguments)))
        return make(*arguments)

    return call


def _copied(budget: Budget, make: object, arguments: tuple[Any, ...], most: int = 1) -> Any:
    if len(arguments) > most or (arguments and type(arguments[0]) not in _SEQUENCES):
        raise refused(make, arguments)
    source = arguments[0] if arguments else ()
    budget.spend(len(source))
    return source


def _sequence(make: type) -> Call:
    return lambda budget, arguments: make(_copied(budget, make, arguments))


def _set(make: type) -> Call:
    def call(budget: Budget, arguments: tuple[Any, ...]) -> Any:
        source = _copied(budget, make, arguments)
        budget.admit_keys(source)
        return make(source)

    return call


def _keys(make: object, source: Any) -> Iterator[Any]:
    for item in source:
        if type(item) not in (list, tuple) or len(item) != 2:
            raise refused(make, (item,))
        yield item[0]


def _dict(make: type) -> Call:
    def call(budget: Budget, arguments: tuple[Any, ...]) -> Any:
        source = _copied(budget, make, arguments)
        budget.admit_keys(source if type(source) is dict else _keys(make, source))
        return make(source)

    return call


def _counter(budget: Budget, arguments: tuple[Any, ...]) -> collections.Counter[Any]:
    source = _copied(budget, collections.Counter, arguments)
    budget.admit_keys(source)
    return collections.Counter(source)


def _defaultdict(budget: Budget, arguments: tuple[Any, ...]) -> collections.defaultdict[Any, Any]:
    if len(arguments) > 2 or (arguments and arguments[0] is not None and not callable(arguments[0])):
        raise refused(collections.defaultdict, arguments)
    content = _dict(dict)(budget, arguments[1:])
    made = collections.defaultdict(arguments[0] if arguments else None, content)
    budget.nest(made, content.values())
    return made


def _deque(budget: Budget, arguments: tuple[Any, ...]) -> collections.deque[Any]:
    source = _copied(budget, collections.deque, arguments, most=2)
    if any(type(longest) not in (int, _NONE) for longest in arguments[1:]):
        raise refused(collections.deque, arguments)
    made = collections.deque(source, *arguments[1:])
    budget.nest(made, made)
    return made


def _empty(make: type) -> Call:
    def call(_: Budget, arguments: tuple[Any, ...]) -> Any:
        if arguments:
            raise refused(make, arguments)
        return make.__new__(make)  # type: ignore[call-overload]

    return call


def _state_bytes(make: type, arguments: tuple[Any, ...], length: int) -> bytes | None:
    state = arguments[0] if arguments else None
    if type(state) is str:  # from Python 2
        state = state.encode("latin1")
    if type(state) is not bytes:
        return None
    if len(state) != length or len(arguments) > 2:
        raise refused(make, arguments)
    return state


def _zone(make: type, arguments: tuple[Any, ...]) -> dt.timezone | None:
    zone = arguments[1] if len(arguments) > 1 else None
    if type(zone) not in (dt.timezone, _NONE):
        raise refused(make, arguments)
    return zone


def _date(budget: Budget, arguments: tuple[Any, ...]) -> dt.date:
    state = _state_bytes(dt.date, arguments, 4)
    if state is None:
        made: dt.date = _of_kinds(dt.date, 3, int)(budget, arguments)
        return made
    return dt.date(state[0] << 8 | state[1], *state[2:])


def _time(budget: Budget, arguments: tuple[Any, ...]) -> dt.time:
    state = _state_bytes(dt.time, arguments, 6)
    if state is None:
        made: dt.time = _of_kinds(dt.time, 5, int, _NONE, dt.timezone)(budget, arguments)
        return made
    fold, hour = divmod(state[0], 128)
    return dt.time(hour, state[1], state[2], int.from_bytes(state[3:], "big"), _zone(dt.time, arguments), fold=fold)


def _datetime(budget: Budget, arguments: tuple[Any, ...]) -> dt.datetime:
    state = _state_bytes(dt.datetime, arguments, 10)
    if state is None:
        made: dt.datetime = _of_kinds(dt.datetime, 8, int, _NONE, dt.timezone)(budget, arguments)
        return made
    fold, month = divmod(state[2], 128)
    zone = _zone(dt.datetime, arguments)
    year, microsecond = state[0] << 8 | state[1], int.from_bytes(state[7:], "big")
    make: Callable[..., dt.datetime] = dt.datetime
    return make(year, month, *state[3:7], microsecond, tzinfo=zone, fold=fold)


def _path(make: type[pathlib.PurePath]) -> Call:
    def call(budget: Budget, arguments: tuple[Any, ...]) -> Any:
        if any(type(part) is not str for part in arguments):
            raise refused(make, arguments)
        budget.spend(sum(map(len, arguments)) + len(arguments))
        return make(*arguments)

    return call


def set_attributes(budget: Budget, instance: Any, state: Any) -> Any:
    """Set attributes; refuse ones that hide the class's."""
    if state is None:
        return instance
    if type(state) is not dict or any(type(name) is not str or hasattr(type(instance), name) for name in state):
        raise UnsafePickleError(f"the attributes of {described(instance)} are not allowed")
    budget.spend(len(state))
    vars(instance).update(state)
    return instance


def _new_uuid(budget: Budget, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return _empty(uuid.UUID)(budget, (*arguments, *named))


def _set_uuid(_: Budget, instance: uuid.UUID, state: Any) -> uuid.UUID:
    number = state.get("int") if type(state) is dict else None
    if type(number) is not int or not 0 <= number < 1 << 128 or state.get("is_safe") not in (None, 0, -1):
        raise UnsafePickleError("the state of a UUID is not allowed")
    instance.__setstate__(state)  # type: ignore[attr-defined]
    return instance


def _set_stream(*kinds: type) -> State:
    def build(budget: Budget, instance: Any, state: Any) -> Any:
        if type(state) is not tuple or len(state) != len(kinds) + 2:
            raise UnsafePickleError(f"the state of {described(instance)} is not allowed")
        *content, position, attributes = state
        right = all(type(each) in (kind, _NONE) for each, kind in zip(content, kinds, strict=True))
        value = content[0] if right and content[0] is not None else ""
        if not right or type(position) is not int or not 0 <= position <= len(value) or attributes:
            raise UnsafePickleError(f"the state of {described(instance)} is not allowed")
        budget.spend(len(value))
        instance.__setstate__(state)
        return instance

    return build


PYTHON_CALLS: list[tuple[Any, Call]] = [
    (bool, _of_kinds(bool, 1, *_SCALARS)),
    (int, _number(int)),
    (float, _number(float)),
    (complex, _number(complex)),
    (str, _string),
    (bytes, _buffer(bytes)),
    (bytearray, _buffer(bytearray)),
    (list, _sequence(list)),
    (tuple, _sequence(tuple)),
    (set, _set(set)),
    (frozenset, _set(frozenset)),
    (dict, _dict(dict)),
    (collections.OrderedDict, _dict(collections.OrderedDict)),
    (collections.Counter, _counter),
    (collections.defaultdict, _defaultdict),
    (collections.deque, _deque),
    (range, _of_kinds(range, 3, int, least=1)),
    (slice, _of_kinds(slice, 3, *_SCALARS, least=1)),
    (dt.date, _date),
    (dt.time, _time),
    (dt.datetime, _datetime),
    (dt.timedelta, _of_kinds(dt.timedelta, 3, int)),
    (dt.timezone, _of_kinds(dt.timezone, 2, dt.timedelta, str, least=1)),
    (decimal.Decimal, _decimal),
    (fractions.Fraction, _fraction),
    (uuid.UUID, _of_kinds(uuid.UUID, 1, str, least=1)),
    (argparse.Namespace, _empty(argparse.Namespace)),
    (types.SimpleNamespace, _empty(types.SimpleNamespace)),
    (io.BytesIO, _empty(io.BytesIO)),
    (io.StringIO, _empty(io.StringIO)),
    *((path, _path(path)) for path in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))),
    (pathlib.PurePath, _path(pathlib.PurePath)),
    (pathlib.Path, _path(pathlib.Path)),
]

PYTHON_FUNCTIONS = [Function("_codecs.encode", _encode)]
"""Functions that a pickle may call but not contain."""
PYTHON_NEWS: list[tuple[type, New]] = [(uuid.UUID, _new_uuid)]
"""Python class → rule that creates an instance without `__init__`."""

PYTHON_STATES: dict[type, State] = {
    argparse.Namespace: set_attributes,
    types.SimpleNamespace: set_attributes,
    collections.OrderedDict: set_attributes,
    uuid.UUID: _set_uuid,
    io.BytesIO: _set_stream(bytes),
    io.StringIO: _set_stream(str, str),
}
