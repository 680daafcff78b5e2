"""A pickle reader that calls nothing but what it was given, and never looks a name up by importing.

It differs from the standard one where that one is too obliging: a global is a key of an allow-list; only objects of
that list are called (by identity, so that nothing reachable through them is); state goes only into instances of its
classes and is checked first for numpy's dtypes and arrays, whose own `__setstate__` trusts it; items go only into
plain containers; calls do not make much of little (`call_limits`). Which globals are safe is decided elsewhere.
"""

from __future__ import annotations

import _compat_pickle
import collections
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from dcp_core.call_limits import CallLimits

__all__ = ["ForbiddenGlobalError", "RestrictedUnpickler", "python3_name"]

_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
# Called with a sequence, they hash its items, or the first of each item.
_HASHING = (*_DICTS, set, frozenset)
_BUILT = (torch.Tensor, torch.nn.Parameter)
# Nested as deep as that a tuple is still hashed safely.
_MAX_HASHED_PARTS = 1000
_STANDARD: dict[int, Callable[[Any], None]] = vars(pickle._Unpickler)["dispatch"]  # noqa: SLF001


class ForbiddenGlobalError(pickle.UnpicklingError):
    """The pickle names a global that is not on the list; `path` is its module and name."""

    def __init__(self, path: str) -> None:
        super().__init__(f"the global {path} is not allowed")
        self.path = path


def python3_name(module: str, name: str) -> str:
    """The full name of a global that a pickle of protocol 2 or lower may give under its Python 2 name."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[(module, name)]
    else:
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}"


# The C unpickler offers find_class only; calls, states and items can be checked in the Python one alone.
class RestrictedUnpickler(pickle._Unpickler):  # noqa: SLF001
    """Unpickles with the globals of an allow-list only.

    Args:
        file: Binary file with the pickle; has `tell`.
        allowed: Full name → object, of every global that may occur.
        callables: `id` of those that may be called (with any arguments), and, if classes, get state.
        kwargs: As for `pickle.Unpickler`.

    Raises (from `load`):
        ForbiddenGlobalError: Another global occurs.
        pickle.UnpicklingError: Another operation is not allowed.
    """

    proto: int
    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]
    read: Callable[[int], bytes]

    def __init__(self, file: Any, *, allowed: Mapping[str, Any], callables: frozenset[int], **kwargs: Any) -> None:
        super().__init__(file, **kwargs)
        self._allowed = allowed
        self._callables = callables
        self._limits = CallLimits()
        self._tell: Callable[[], int] = file.tell

    def find_class(self, module: str, name: str) -> Any:
        """The allowed global of that name."""
        path = python3_name(module, name) if self.proto < 3 else f"{module}.{name}"
        if path not in self._allowed:
            raise ForbiddenGlobalError(path)
        return self._allowed[path]

    def get_extension(self, code: int) -> None:
        """Refuse: extension codes name globals of this process, not of the file."""
        raise pickle.UnpicklingError(f"extension code {code} is not allowed")

    def _instantiate(self, klass: Any, args: Any) -> None:
        """Refuse: only pickles of protocols 0 and 1 need it."""
        raise pickle.UnpicklingError(f"opcode of an old protocol for {klass!r} with {len(args)} arguments")

    def _check_call(self, func: Any, arguments: Any) -> None:
        if id(func) not in self._callables:
            raise pickle.UnpicklingError(f"a call of {func!r} is not allowed")
        if any(func is hashing for hashing in _HASHING):
            _check_hashed(_hashed_items(arguments))
        if type(arguments) is tuple:
            self._limits.check(func, arguments, self._tell())

    def _reduce(self) -> None:
        self._check_call(self.stack[-2], self.stack[-1])
        _STANDARD[pickle.REDUCE[0]](self)

    def _newobj(self) -> None:
        self._check_call(self.stack[-2], self.stack[-1])
        _STANDARD[pickle.NEWOBJ[0]](self)

    def _newobj_ex(self) -> None:
        self._check_call(self.stack[-3], self.stack[-2])
        _STANDARD[pickle.NEWOBJ_EX[0]](self)

    def _build(self) -> None:
        state, instance = self.stack[-1], self.stack[-2]
        if isinstance(instance, np.dtype):
            self.stack.pop()
            self._replace(instance, _finished_dtype(instance, state))
            return
        if type(instance) is np.ndarray:
            _check_array_state(state)
        elif type(instance) not in _BUILT and id(type(instance)) not in self._callables:
            raise pickle.UnpicklingError(f"state for a {type(instance).__qualname__} is not allowed")
        _STANDARD[pickle.BUILD[0]](self)

    def _replace(self, old: Any, new: Any) -> None:
        """Put `new` on top of the stack, and wherever the pickle has noted `old` for later use."""
        self.stack[-1] = new
        self.memo.update({key: new for key, value in self.memo.items() if value is old})

    def _dict(self) -> None:
        _check_hashed(self.stack[::2])
        _STANDARD[pickle.DICT[0]](self)

    def _setitem(self) -> None:
        self._check_items(self.stack[-3], _DICTS)
        _check_hashed(self.stack[-2:-1])
        _STANDARD[pickle.SETITEM[0]](self)

    def _setitems(self) -> None:
        self._check_items(self._below_mark(), _DICTS)
        _check_hashed(self.stack[::2])
        _STANDARD[pickle.SETITEMS[0]](self)

    def _append(self) -> None:
        self._check_items(self.stack[-2], (list, collections.deque))
        _STANDARD[pickle.APPEND[0]](self)

    def _appends(self) -> None:
        self._check_items(self._below_mark(), (list, collections.deque))
        _STANDARD[pickle.APPENDS[0]](self)

    def _additems(self) -> None:
        self._check_items(self._below_mark(), (set,))
        _check_hashed(self.stack)
        _STANDARD[pickle.ADDITEMS[0]](self)

    def _frozenset(self) -> None:
        _check_hashed(self.stack)
        _STANDARD[pickle.FROZENSET[0]](self)

    def _bytearray8(self) -> None:
        """As the standard one, which allocates what the pickle says before it looks how much there is."""
        length = int.from_bytes(self.read(8), "little")
        data = self.read(length)
        if len(data) < length:
            raise pickle.UnpicklingError(f"a bytearray of {length:,} bytes has {len(data):,}: the pickle is truncated")
        self.stack.append(bytearray(data))

    def _below_mark(self) -> Any:
        return self.metastack[-1][-1]

    @staticmethod
    def _check_items(container: Any, types: tuple[type, ...]) -> None:
        if type(container) not in types:
            raise pickle.UnpicklingError(f"items for a {type(container).__qualname__} are not allowed")

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **_STANDARD,
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _newobj,
        pickle.NEWOBJ_EX[0]: _newobj_ex,
        pickle.BUILD[0]: _build,
        pickle.DICT[0]: _dict,
        pickle.SETITEM[0]: _setitem,
        pickle.SETITEMS[0]: _setitems,
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends,
        pickle.ADDITEMS[0]: _additems,
        pickle.FROZENSET[0]: _frozenset,
        pickle.BYTEARRAY8[0]: _bytearray8,
    }


def _hashed_items(arguments: Any) -> list[Any]:
    """What a set or dict made with these arguments may hash: items, and the keys among them."""
    found = []
    for argument in arguments:
        for item in argument if isinstance(argument, list | tuple) else ():
            found += item[:1] if isinstance(item, list) else [item]
    return found


def _check_hashed(values: Sequence[Any]) -> None:
    """Refuse what would be hashed for ever, or until the stack ends: Python hashes tuples part by part, every time."""
    for value in values:
        if not isinstance(value, tuple):
            continue
        parts: list[tuple[Any, ...]] = [value]
        seen = 0
        while parts:
            part = parts.pop()
            seen += len(part)
            if seen > _MAX_HASHED_PARTS:
                raise pickle.UnpicklingError(f"a key or set item of more than {_MAX_HASHED_PARTS} parts is not allowed")
            parts += [inner for inner in part if isinstance(inner, tuple)]


def _finished_dtype(dtype: np.dtype[Any], state: Any) -> np.dtype[Any]:
    """The dtype that `dtype.__setstate__(state)` would give, made by numpy's checking constructor instead."""
    _, order, subdtype, names, fields, itemsize, *_ = state
    if subdtype is not None:
        base, shape = subdtype
        return np.dtype((_plain_dtype(base), tuple(map(int, shape))))
    if names is not None:
        parts = [fields[name] for name in names]
        return np.dtype(
            {
                "names": list(names),
                "formats": [_plain_dtype(part[0]) for part in parts],
                "offsets": [int(part[1]) for part in parts],
                "itemsize": int(itemsize),
            }
        )
    if dtype.kind in "mM" and len(state) > 8:
        unit, count = state[8][1][:2]
        name = unit.decode() if isinstance(unit, bytes) else str(unit)
        dtype = np.dtype(f"{dtype.kind}8" if name == "generic" else f"{dtype.kind}8[{int(count)}{name}]")
    return dtype.newbyteorder(order) if order in ("<", ">", "=") else dtype


def _plain_dtype(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise pickle.UnpicklingError(f"{dtype!r} as part of a numpy dtype is not allowed")
    return dtype


def _check_array_state(state: Any) -> None:
    """Accept only raw bytes of the right length for plain dtypes, and a list of the right length for objects."""
    _, shape, dtype, _, data = state
    if not isinstance(dtype, np.dtype) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise pickle.UnpicklingError("the state of a numpy array has no dtype or shape")
    count = math.prod(shape)
    if dtype.hasobject:
        right = dtype == np.dtype(object) and type(data) is list and len(data) == count
    else:
        right = isinstance(data, bytes | bytearray) and len(data) == count * dtype.itemsize
    if not right:
        raise pickle.UnpicklingError(f"the data of a numpy array do not fit its dtype {dtype} and shape {shape}")
