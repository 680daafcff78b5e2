"""Allow-table of the safe pickle reader: allowed names, calls, states and containers, and a work budget.

`safe_pickle` reads a pickle by such a table. A table lists the globals that a pickle may name. For each callable
global it has a replacement, which checks the arguments and makes the value; the real function is never called.
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
# Tuples are hashed by recursion in C. This depth of nesting is still safe.
_MAX_KEY_PARTS = 1000
# Limit of keys with the same hash in one container, since each is compared with all the others.
_MAX_SAME_HASH = 1000
_SMALL = 1 << 60  # hashes of smaller integers are distinct
_FRAGILE = frozenset((collections.deque, collections.defaultdict, np.ndarray))
_MAX_NESTED = 50
_CHEAP = frozenset((str, bytes, bool, type(None)))


class BrokenPickleError(ValueError):
    """The bytes are not a complete pickle. `offset` is the position at which reading stopped."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


class UnsafePickleError(ValueError):
    """The pickle uses a feature that the table does not allow, or exceeds its limit of work or memory."""


class ForbiddenGlobalError(UnsafePickleError):
    """The pickle names a global that the table does not allow; `path` is its module and name."""

    def __init__(self, path: str) -> None:
        super().__init__(f"asks for {path}")
        self.path = path


class Budget:
    """Work budget of one pickle: the number of elements that its calls may still copy and its keys may still hash.

    In an ordinary pickle each value is an argument of one call only, so the calls copy no more elements than the pickle
    has bytes. A hostile pickle may contain `set(range(1 << 40))`, or copy one list a million times.

    Args:
        total: Limit of copied and hashed elements, in addition to a million that are always allowed.
    """

    __slots__ = ("_crowds", "_late", "_left", "_levels", "_within")

    def __init__(self, total: int) -> None:
        self._left = total + _FREE_WORK
        # id of a container that is freed by recursion → the container and its depth of nesting, also for nested ones
        self._levels: dict[int, tuple[object, int]] = {}
        self._within: dict[int, object] = {}
        self._late = 0
        # id of a container → the container, and the number of its keys for each hash
        self._crowds: dict[int, tuple[object, dict[int, int]]] = {}

    def spend(self, amount: int) -> None:
        """Charge `amount` elements of work before doing it. Raises UnsafePickleError if the budget is exhausted."""
        self._left -= amount
        if self._left < 0:
            raise UnsafePickleError("needs far more memory or work than its size justifies")

    def admit_key(self, container: object, key: Any) -> None:
        """Check that a key is cheap to hash and compare, before it goes into a dict or set.

        Python hashes a tuple element by element, which takes exponential time for nested tuples with shared elements,
        and compares keys with equal hashes pair by pair.

        Raises:
            UnsafePickleError: Hashing or comparing the key would take too long, or recurse too deeply.
            TypeError: The key is not hashable.
        """
        if not _is_cheap(key):
            _, crowds = self._crowds.setdefault(id(container), (container, {}))
            self._admit(key, crowds)

    def admit_keys(self, keys: Iterable[Any]) -> None:
        """Check all keys of a new container like `admit_key`."""
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
        """Limit the nesting of containers that Python frees by recursion; call this after `values` were added.

        Freeing a deeply nested `deque`, or a similar container, overflows the C stack and ends the process.

        Raises:
            UnsafePickleError: The containers are nested too deeply.
        """
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
        """Charge the work of hashing and comparing a key to the budget."""
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
    """Whether a key is hashed quickly, to an almost unique hash."""
    kind = type(key)
    return kind in _CHEAP or (kind is int and -_SMALL < key < _SMALL)


Call = Callable[[Budget, tuple[Any, ...]], Any]
"""Type of functions that replace a call in a pickle: they check the arguments, and return the value or raise."""
New = Callable[[Budget, tuple[Any, ...], dict[str, Any]], Any]
"""Type of functions that replace `__new__` of a class: like `Call`, for an instance that is made without `__init__`."""
State = Callable[[Budget, Any, Any], Any]
"""Type of functions that check and set the state of an instance; they return the instance, or its replacement."""


@dataclass(frozen=True, slots=True)
class RecordClass:
    """Stand-in for a class that a pickle names; the pickled instances of the class become `Record`s."""

    name: str


@dataclass(frozen=True, slots=True)
class Function:
    """Stand-in for a function: when the pickle calls it, `call` is called instead."""

    name: str
    call: Call


class Record:
    """A pickled instance of the class for which a `RecordClass` stands: the full name of the class, and its state."""

    __slots__ = ("name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Any = None


@dataclass(frozen=True, slots=True)
class PickleTable:
    """Allow-table of a pickle. Types and objects are matched by identity; attributes of allowed objects are refused."""

    find: Callable[[str], Any]
    """Function (full Python 3 name of a global) → the global's replacement: a stand-in of this module, or any value.

    It raises `ForbiddenGlobalError` for a name that is not allowed.
    """
    calls: Mapping[int, Call] = field(default_factory=dict)
    """`id` of a value that `find` returned → function that replaces its calls; other values cannot be called."""
    news: Mapping[int, New] = field(default_factory=dict)
    """`id` of a class → function that replaces its `__new__`, for classes whose `__new__` differs from a call."""
    states: Mapping[type, State] = field(default_factory=dict)
    """Type of an instance → function that sets the state of the instance."""
    lists: frozenset[type] = frozenset((list,))
    """Types to which a pickle may add items by `extend`."""
    dicts: frozenset[type] = frozenset((dict,))
    """Types to which a pickle may add pairs by `[]`."""
    sets: frozenset[type] = frozenset((set,))
    """Types to which a pickle may add items by `update`."""
    drafts: frozenset[type] = frozenset()
    """Types whose instances are replaced by another value when their state is set, since they are immutable."""


def described(value: object) -> str:
    """Describe a value by its type, for messages; the `repr` of a value from a tiny pickle may be endless."""
    if isinstance(value, (Record, RecordClass, Function)):
        return value.name
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return f"a {type(value).__name__}"


def python3_name(module: str, name: str) -> str:
    """Return the full Python 3 name of a global; pickles of protocol 2 or lower may use its Python 2 name."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[(module, name)]
    else:
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}"
