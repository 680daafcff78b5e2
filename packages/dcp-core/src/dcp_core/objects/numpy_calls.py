"""Rules for numpy arrays, scalars and dtypes in pickles of stored objects.

numpy's own functions accept bytes as pointers, or a dtype longer than the memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from dcp_core.objects.python_calls import refused
from dcp_manifest.pickles.pickle_table import Budget, Call, Function, State, UnsafePickleError, described

# Type code, length and time unit only: no fields, shapes or objects.
_SPEC = re.compile(r"[|<>=]?[a-zA-Z?][0-9]{0,9}(\[[0-9]{0,9}[a-zA-Z]{1,7}\])?")
_PLAIN_KINDS = "biufcmMSUV"
_MAX_BYTES = 1 << 62
_MAX_ITEM = 1 << 30
_MAX_LEAVES, _MAX_DEPTH = 10_000, 16
_MAX_TEXT = 4300
_PLAIN = frozenset((bool, int, float, complex, str, bytes))
_TYPES = frozenset(value for value in set(np.sctypeDict.values()) if not issubclass(value, np.void | np.object_))
NUMPY_VALUES: dict[str, Any] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    **{f"numpy.{value.__name__}": value for value in _TYPES},
}
"""Full name → global, if equal in all versions of numpy."""
NUMPY_DTYPES = frozenset(type(np.dtype(code)) for code in "?bBhHiIlLqQpPefdgFDGSUVmMO")


def _plain(dtype: Any) -> np.dtype[Any]:
    if (
        type(dtype) not in NUMPY_DTYPES
        or dtype.hasobject
        or dtype.kind not in _PLAIN_KINDS
        or dtype.itemsize >= 1 << 31
    ):
        raise UnsafePickleError(f"a numpy dtype of {described(dtype)} is not allowed here")
    return dtype  # type: ignore[no-any-return]


def _dtype(_: Budget, arguments: tuple[Any, ...]) -> np.dtype[Any]:
    spec = arguments[0] if 1 <= len(arguments) <= 3 else None
    text = type(spec) is str and len(spec) < 40 and _SPEC.fullmatch(spec)
    if not text and not any(spec is known for known in _TYPES):  # a set would call its __hash__
        raise refused(np.dtype, arguments)
    make: Callable[[Any], np.dtype[Any]] = np.dtype
    dtype = make(spec)
    return dtype if dtype == np.dtype(object) else _plain(dtype)


def _set_dtype(budget: Budget, dtype: np.dtype[Any], state: Any) -> np.dtype[Any]:
    _, order, subdtype, names, fields, itemsize, *_ = state
    if subdtype is not None:
        base, shape = subdtype
        if type(shape) is not tuple or math.prod(map(_extent, shape)) * max(1, _plain(base).itemsize) >= _MAX_ITEM:
            raise UnsafePickleError("a numpy dtype of that size is not allowed")
        return _checked(budget, np.dtype((_plain(base), tuple(map(_extent, shape)))))
    if names is not None:
        if type(names) is not tuple or type(fields) is not dict or any(type(name) is not str for name in names):
            raise UnsafePickleError("the names of a numpy dtype are not allowed")
        budget.spend(len(names))
        parts = [fields[name] for name in names]
        layout: dict[str, Any] = {
            "names": list(names),
            "formats": [_plain(part[0]) for part in parts],
            "offsets": [_extent(part[1]) for part in parts],
            "itemsize": _extent(itemsize),
        }
        # numpy compares in 32 bits, so a field's end may overflow to before its start.
        for part, offset in zip(layout["formats"], layout["offsets"], strict=True):
            if offset + part.itemsize > itemsize:
                raise UnsafePickleError("a field beyond the end of its numpy dtype is not allowed")
        made: np.dtype[Any] = np.dtype(layout)  # type: ignore[call-overload]
        return _checked(budget, made)
    if dtype.kind in "mM" and len(state) > 8:
        unit, count = state[8][1][:2]
        name = unit.decode() if type(unit) is bytes else unit
        if type(name) is not str or type(count) is not int:
            raise UnsafePickleError("the unit of a numpy dtype is not allowed")
        dtype = np.dtype(f"{dtype.kind}8" if name == "generic" else f"{dtype.kind}8[{_extent(count)}{name}]")
    return dtype.newbyteorder(order) if order in ("<", ">", "=") else dtype


def _extent(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_ITEM:
        raise UnsafePickleError("a size in a numpy dtype is not allowed")
    return value


def _checked(budget: Budget, dtype: np.dtype[Any]) -> np.dtype[Any]:
    leaves, depth = _size(dtype)
    budget.spend(leaves)
    if dtype.itemsize >= _MAX_ITEM or leaves > _MAX_LEAVES or depth > _MAX_DEPTH:
        raise UnsafePickleError("a numpy dtype of that size or depth is not allowed")
    return dtype


def _size(dtype: np.dtype[Any]) -> tuple[int, int]:
    inner = [] if dtype.fields is None else [field[0] for field in dtype.fields.values()]
    inner += [] if dtype.subdtype is None else [dtype.subdtype[0]]
    leaves, depth = 0, 0
    for part in inner:
        more, below = _size(part)
        leaves, depth = leaves + more, max(depth, below)
        if leaves > _MAX_LEAVES:
            break
    return max(1, leaves), depth + 1


def _empty_array(_: Budget, arguments: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    if len(arguments) != 3 or arguments[0] is not np.ndarray or arguments[1] != (0,) or arguments[2] not in ("b", b"b"):
        raise refused(np.ndarray, arguments)
    empty: np.ndarray[Any, Any] = np.ndarray((0,), np.int8)
    return empty


def _set_array(budget: Budget, array: np.ndarray[Any, Any], state: Any) -> np.ndarray[Any, Any]:
    _, shape, dtype, fortran, data = state
    waits = array.shape == (0,) and array.dtype == np.int8 and array.flags.owndata
    if not waits or type(fortran) not in (bool, int):
        raise UnsafePickleError("a state for a numpy array that has one is not allowed")
    count = _count(shape)
    if type(dtype) in NUMPY_DTYPES and dtype == np.dtype(object):
        right = type(data) is list and len(data) == count
    else:
        right = type(data) in (bytes, bytearray) and len(data) == count * _plain(dtype).itemsize and not dtype.subdtype
    if not right or count * dtype.itemsize > _MAX_BYTES:
        raise UnsafePickleError("a numpy array with data that do not fit its dtype and shape is not allowed")
    budget.spend(len(data) if dtype.itemsize else count)
    set_state: Callable[[Any], None] = array.__setstate__
    set_state((1, shape, dtype, bool(fortran), bytes(data) if type(data) is bytearray else data))
    if dtype.hasobject:
        budget.nest(array, data)
    return array


def _count(shape: Any) -> int:
    right = type(shape) is tuple and len(shape) <= 32 and all(type(extent) is int and extent >= 0 for extent in shape)
    if not right or math.prod(extent or 1 for extent in shape) > _MAX_BYTES:
        raise UnsafePickleError("the shape of a numpy array is not allowed")
    return math.prod(shape)


def _scalar(budget: Budget, arguments: tuple[Any, ...]) -> Any:
    if not 1 <= len(arguments) <= 2:
        raise refused(np.generic, arguments)
    dtype, data = _plain(arguments[0]), arguments[1] if len(arguments) > 1 else b""
    if type(data) is str:
        data = data.encode("latin1")
    if type(data) is not bytes or len(data) != dtype.itemsize or dtype.subdtype is not None:
        raise UnsafePickleError("a numpy scalar with data that do not fit its dtype is not allowed")
    budget.spend(len(data))
    return np.frombuffer(data, dtype)[0] if data else np.zeros((), dtype)[()]


def _from_buffer(budget: Budget, arguments: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    if len(arguments) != 4 or type(arguments[0]) not in (bytes, bytearray) or arguments[3] not in ("C", "F"):
        raise refused(np.frombuffer, arguments)
    data, dtype, shape, order = arguments
    if _count(shape) * _plain(dtype).itemsize != len(data) or dtype.subdtype is not None:
        raise UnsafePickleError("a numpy array with data that do not fit its dtype and shape is not allowed")
    budget.spend(0 if dtype.itemsize else _count(shape))
    if not data:
        return np.zeros(shape, dtype, order)
    array: np.ndarray[Any, Any] = np.frombuffer(data, dtype).reshape(shape, order=order)
    return array


def _number(make: type) -> Call:
    accepted: frozenset[type] = frozenset((bytes,)) if make is np.bytes_ else _PLAIN

    def call(budget: Budget, arguments: tuple[Any, ...]) -> Any:
        few = all(type(argument) not in (str, bytes) or len(argument) <= _MAX_TEXT for argument in arguments)
        if len(arguments) > 1 or not few or any(type(argument) not in accepted for argument in arguments):
            raise refused(make, arguments)
        budget.spend(sum(len(argument) for argument in arguments if type(argument) in (str, bytes)))
        return make(*arguments)

    return call


# numpy 2 renamed its module; checkpoints may name either.
NUMPY_VALUES.update(
    (f"numpy.{core}.{name}", Function(f"numpy.{core}.{name}", call))
    for core in ("core", "_core")
    for name, call in {
        "multiarray._reconstruct": _empty_array,
        "multiarray.scalar": _scalar,
        "numeric._frombuffer": _from_buffer,
    }.items()
)
NUMPY_CALLS: list[tuple[Any, Call]] = [(np.dtype, _dtype), *((value, _number(value)) for value in _TYPES)]
NUMPY_STATES: dict[type, State] = {np.ndarray: _set_array, **dict.fromkeys(NUMPY_DTYPES, _set_dtype)}
