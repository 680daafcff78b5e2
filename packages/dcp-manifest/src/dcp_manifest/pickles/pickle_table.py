"""Allow-table of the pickle reader: names, calls, states and containers, and a budget of work.

`safe_pickle` is the machine that reads a pickle by such a table. A table lists what may be named, and, for each thing
that may be called, a function that checks the arguments and makes the value instead of the thing itself.
"""

from __future__ import annotations

import _compat_pickle
import collections
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = [
    "BrokenPickleError",
    "Budget",
    "Call",
    "ForbiddenGlobalError",
    "Function",
    "PickleTable",
    "Record",
    "RecordClass",
    "UnsafePickleError",
    "described",
    "python3_name",
]

_FREE_WORK = 1 << 20
# A tuple is hashed part by part, by recursion in C, each time: nested as deep as that it is still hashed safely.
_MAX_KEY_PARTS = 1000
# So many keys of one container may have the same hash: each is compared with all others.
_MAX_SAME_HASH = 1000
_SMALL = 1 << 60  # smaller integers have hashes of their own
_FRAGILE = frozenset((collections.deque, collections.defaultdict, np.ndarray))
_MAX_NESTED = 50
_CHEAP = frozenset((str, bytes, bool, type(None)))


class BrokenPickleError(ValueError):
    """The bytes are no pickle, or an incomplete one. `offset` is where reading stopped."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


class UnsafePickleError(ValueError):
    """The pickle uses something that the caller's table does not allow, or too much work or memory."""


class ForbiddenGlobalError(UnsafePickleError):
    """The pickle names a global that is not in the table; `path` is its module and name."""

    def __init__(self, path: str) -> None:
        super().__init__(f"asks for {path}")
        self.path = path


class Budget:
    """The work that the calls and keys of one pickle may still cause, in copied or hashed elements.

    A pickle that was written from values hands each of them to one call only, so that its calls copy no more elements
    than it has bytes. A hostile one would have `set(range(1 << 40))`, or one list copied a million times.

    Args:
        total: How many elements may be copied or hashed in all, beside a million that are free.
    """

    __slots__ = ("_crowds", "_late", "_left", "_levels", "_within")

    def __init__(self, total: int) -> None:
        self._left = total + _FREE_WORK
        # id of a fragile container → it, and how many such it has within; the same for those that are within one
        self._levels: dict[int, tuple[object, int]] = {}
        self._within: dict[int, object] = {}
        self._late = 0
        # id of a container → the container, and how many of its keys have each hash
        self._crowds: dict[int, tuple[object, dict[int, int]]] = {}

    def spend(self, amount: int) -> None:
        """Charge work before it is done. Raises UnsafePickleError when the budget is spent."""
        self._left -= amount
        if self._left < 0:
            raise UnsafePickleError("asks for far more memory or work than it has bytes")

    def admit_key(self, container: object, key: Any) -> None:
        """Check a key before a dict or set on the stack hashes it.

        Python hashes a tuple part by part and without end if its parts are shared, and compares keys of equal hash one
        with the other.

        Raises:
            UnsafePickleError: Hashing or comparing it would take too long, or too deep a recursion.
            TypeError: It cannot be hashed.
        """
        if not _is_cheap(key):
            _, crowds = self._crowds.setdefault(id(container), (container, {}))
            self._admit(key, crowds)

    def admit_keys(self, keys: Iterable[Any]) -> None:
        """Check all keys of a new container; raises as `admit_key`."""
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
        """Bound the depth of containers that Python frees by recursion; call it after `values` were put in.

        Freeing a `deque` in a `deque` in a `deque` … ends the process, as that of the others here: C has no stack left.

        Raises:
            UnsafePickleError: They are nested too deeply.
        """
        inner = [value for value in values if type(value) in _FRAGILE] if type(container) in _FRAGILE else []
        if not inner:
            return
        # What is filled after it was put into another one makes that one deeper, which has been counted by then.
        self._late += id(container) in self._within
        level = 1 + max(self._levels.get(id(value), (value, 0))[1] for value in inner)
        known = self._levels.get(id(container), (container, 0))[1]
        self._levels[id(container)] = container, max(level, known)
        self._within.update((id(value), value) for value in inner)
        if level > _MAX_NESTED or self._late > _MAX_NESTED:
            raise UnsafePickleError(f"nests {described(container)} more than {_MAX_NESTED} deep, which is not allowed")

    def _weigh(self, key: Any) -> None:
        """Charge the work of hashing and comparing a key."""
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
    """Whether a key is hashed in no time, and to a hash that is almost unique."""
    kind = type(key)
    return kind in _CHEAP or (kind is int and -_SMALL < key < _SMALL)


Call = Callable[[Budget, tuple[Any, ...]], Any]
"""Makes the value of a call in the pickle, from checked arguments; raises if they are not allowed."""
New = Callable[[Budget, tuple[Any, ...], dict[str, Any]], Any]
"""As `Call`, for an instance that is made without its constructor."""
State = Callable[[Budget, Any, Any], Any]
"""Sets an instance's checked state; returns it, or the value that replaces it."""


@dataclass(frozen=True, slots=True)
class RecordClass:
    """Stand-in for a class: instances become `Record`s."""

    name: str


@dataclass(frozen=True, slots=True)
class Function:
    """Stand-in for a function that the pickle calls: `call` is called instead."""

    name: str
    call: Call


class Record:
    """An instance of a `RecordClass`, as its state."""

    __slots__ = ("name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Any = None


@dataclass(frozen=True, slots=True)
class PickleTable:
    """Allow-table of a pickle. Types and objects count by identity, and allow nothing reachable through them."""

    find: Callable[[str], Any]
    """Full name (under Python 3) → what stands for it: a stand-in of this module, or any value.

    Raises `ForbiddenGlobalError` for a name that is not allowed.
    """
    calls: Mapping[int, Call] = field(default_factory=dict)
    """`id` of a value from `find` → rule for calling it; values without a rule are not called."""
    news: Mapping[int, New] = field(default_factory=dict)
    """`id` of a class → what `__new__` does, where that differs from a call."""
    states: Mapping[type, State] = field(default_factory=dict)
    """Type of an instance → rule for setting its state."""
    lists: frozenset[type] = frozenset((list,))
    """Types that take items by `extend`."""
    dicts: frozenset[type] = frozenset((dict,))
    """Types that take pairs by `[]`."""
    sets: frozenset[type] = frozenset((set,))
    """Types that take items by `update`."""
    drafts: frozenset[type] = frozenset()
    """Types of immutable values that a state replaces by another value."""


def described(value: object) -> str:
    """Return the kind of a value, for messages. Not its `repr`: a few bytes may make a value whose text never ends."""
    if isinstance(value, (Record, RecordClass, Function)):
        return value.name
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return f"a {type(value).__name__}"


def python3_name(module: str, name: str) -> str:
    """Return the full name of a global that a pickle of protocol 2 or lower may give under its Python 2 name."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[(module, name)]
    else:
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}"
