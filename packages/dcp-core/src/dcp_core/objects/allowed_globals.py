"""Allow-list of the globals (classes and functions) that the pickle of a stored object may name.

The default globals are types that trainers keep in checkpoints, which only hold or build data; the rules for calling
them are in `python_calls`, `numpy_calls` and `tensor_calls`. A global without a rule may be part of the loaded object,
but is not called. Globals that give access to attributes of arbitrary objects, files, imports or code must never be
added.
"""

from __future__ import annotations

import collections
import functools
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._weights_only_unpickler as torch_rules

from dcp_core.objects.numpy_calls import NUMPY_CALLS, NUMPY_DTYPES, NUMPY_STATES, NUMPY_VALUES
from dcp_core.objects.python_calls import PYTHON_CALLS, PYTHON_FUNCTIONS, PYTHON_NEWS, PYTHON_STATES, refused
from dcp_core.objects.tensor_calls import TENSOR_CALLS, tensor_functions
from dcp_manifest.pickles.pickle_table import (
    Budget,
    Call,
    ForbiddenGlobalError,
    Function,
    New,
    PickleTable,
    UnsafePickleError,
    described,
)

__all__ = [
    "AllowList",
    "allowed_globals",
    "census_table",
    "default_globals",
    "default_table",
    "how_to_allow",
    "may_never_be_allowed",
]

# torch refuses the first four even when a user lists them; the others run code or import just as well.
_NEVER_MODULES = frozenset(
    ("sys", "os", "posix", "nt", "subprocess", "shutil", "importlib", "runpy", "pickle", "_pickle", "ctypes")
)
_NEVER_NAMES = frozenset(
    f"builtins.{name}"
    for name in ("__import__", "compile", "delattr", "eval", "exec", "getattr", "globals", "open", "setattr", "vars")
) | {"io.open", "io.FileIO", "_io.open", "_io.FileIO"}


_LISTS, _DICTS, _SETS = (list, collections.deque), (dict, collections.OrderedDict), (set,)
_DICT_TYPES = frozenset((*_DICTS, collections.defaultdict, collections.Counter))


@dataclass(frozen=True, slots=True)
class AllowList:
    """Allow-list of a load: the globals that pickles of stored objects may use. Must not be changed."""

    by_name: Mapping[str, Any]
    """Full name of a global → the global, or a checked replacement for it."""
    added: frozenset[str]
    """Full names that only the user allows; these globals are called with any arguments that the pickle gives."""
    table: PickleTable
    """Table of the calls of these globals, states and constants that a pickle may use."""


def allowed_globals(extra: Sequence[Any] = ()) -> AllowList:
    """Return the allow-list of a load: default globals, `extra`, and those of `torch.serialization.add_safe_globals`.

    Args:
        extra: Classes and functions to allow in addition, in the form of `torch.serialization.add_safe_globals`:
            globals, or pairs (global, full name). Globals that are allowed by default keep their restrictions.

    Raises:
        ValueError: `extra` contains a function that could run any code, such as `eval`.
    """
    return _allow_list(tuple(extra), frozenset(torch.serialization.get_safe_globals()))


def may_never_be_allowed(path: str) -> bool:
    """Return whether a global with this full name could run any code and therefore must not be allowed."""
    return path.partition(".")[0] in _NEVER_MODULES or path in _NEVER_NAMES


@functools.lru_cache(maxsize=32)
def _allow_list(extra: tuple[Any, ...], added: frozenset[Any]) -> AllowList:
    known = default_globals()
    named = {path: value for path, value in {**_named(added), **_named(extra)}.items() if path not in known}
    ours = {id(value) for value in known.values()}
    users = [value for value in named.values() if id(value) not in ours]

    def subclassed(function: Callable[..., Any], arguments: tuple[Any, ...], cls: Any) -> Any:
        if not any(cls is value for value in users):
            raise refused(function, (cls,))
        return function(*arguments)

    by_name = {**named, **known, **tensor_functions(subclassed)}
    return AllowList(by_name, frozenset(named), _with_users(default_table(), by_name, users))


def _named(listed: Iterable[Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for entry in listed:
        own = getattr(entry[0] if isinstance(entry, tuple) else entry, "__module__", "") or ""
        value, path = entry if isinstance(entry, tuple) else (entry, f"{own}.{entry.__qualname__}")
        if may_never_be_allowed(path) or may_never_be_allowed(f"{own}.{getattr(value, '__qualname__', '')}"):
            raise ValueError(f"{path} cannot be allowed: a checkpoint could run any code with it")
        named[path] = value
    return named


def _find(by_name: Mapping[str, Any]) -> Callable[[str], Any]:
    def find(path: str) -> Any:
        if path not in by_name:
            raise ForbiddenGlobalError(path)
        return by_name[path]

    return find


@functools.cache
def default_table() -> PickleTable:
    """Return the table of calls, states and constants that the pickle of any stored object may use."""
    calls: list[tuple[Any, Call]] = [*PYTHON_CALLS, *NUMPY_CALLS, *TENSOR_CALLS]
    return PickleTable(
        find=_find(default_globals()),
        calls={id(value): call for value, call in calls},
        news={id(cls): new for cls, new in PYTHON_NEWS},
        states={**PYTHON_STATES, **NUMPY_STATES},
        lists=frozenset(_LISTS),
        dicts=_DICT_TYPES,
        sets=frozenset(_SETS),
        drafts=NUMPY_DTYPES,
    )


def _with_users(table: PickleTable, by_name: Mapping[str, Any], users: Sequence[Any]) -> PickleTable:
    """Add the user's globals to a table: called with any arguments, given any state, and items if it is a container."""
    classes = [value for value in users if isinstance(value, type)]

    def below(bases: tuple[type, ...]) -> set[type]:
        return {cls for cls in classes if issubclass(cls, bases)}

    return replace(
        table,
        find=_find(by_name),
        calls={**{id(value): _calling(value) for value in users if callable(value)}, **table.calls},
        news={**{id(cls): _making(cls) for cls in classes}, **table.news},
        states={**dict.fromkeys(classes, _set_any), **table.states},
        lists=table.lists | below(_LISTS),
        dicts=table.dicts | below(_DICTS),
        sets=table.sets | below(_SETS),
    )


def _calling(value: Callable[..., Any]) -> Call:
    return lambda _, arguments: value(*arguments)


def _making(cls: type) -> New:
    return lambda _, arguments, named: cls.__new__(cls, *arguments, **named)


def _set_any(budget: Budget, instance: Any, state: Any) -> Any:
    """Set the state of an object as `pickle` does."""
    setstate = getattr(instance, "__setstate__", None)
    if setstate is not None:
        setstate(state)
        return instance
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        budget.spend(len(state))
        vars(instance).update(state)
    for name, value in (slots or {}).items():
        setattr(instance, name, value)
    return instance


@functools.cache
def default_globals() -> dict[str, Any]:
    """Return the globals allowed by default: full name → global, or a checked replacement. Must not be changed."""

    def subclassed(function: Callable[..., Any], _: tuple[Any, ...], cls: Any) -> Any:
        raise refused(function, (cls,))

    values = {
        name: value
        for name, value in torch_rules._get_allowed_globals().items()  # noqa: SLF001
        if not name.startswith("torch._")
    }
    return {**values, **tensor_functions(subclassed), **_python_globals(), **NUMPY_VALUES}


def _python_globals() -> dict[str, Any]:
    classes = [value for value, _ in [*PYTHON_CALLS, *TENSOR_CALLS]]
    named: dict[str, Any] = {f"{value.__module__}.{value.__qualname__}": value for value in classes}
    named.update((function.name, function) for function in PYTHON_FUNCTIONS)
    named["builtins.Ellipsis"] = ...
    named["io.BytesIO"], named["io.StringIO"] = named["_io.BytesIO"], named["_io.StringIO"]
    # A path class of the other system becomes its pure form; CPython 3.13.0 names another module.
    foreign = "PosixPath" if os.name == "nt" else "WindowsPath"
    for name in ("PurePath", "PurePosixPath", "PureWindowsPath", "Path", "PosixPath", "WindowsPath"):
        value = getattr(pathlib, f"Pure{name}" if name == foreign else name)
        named[f"pathlib.{name}"] = named[f"pathlib._local.{name}"] = value
    return named


class _Unknown:
    """Stand-in, while a pickle is examined, for a global that is not allowed or that only a user allows."""

    def ignore(self, *_: Any) -> Any:
        """Accept any call and do nothing."""
        return self

    __call__ = __setitem__ = extend = update = ignore


_UNKNOWN = _Unknown()


def census_table(allowed: AllowList, named: set[str]) -> PickleTable:
    """Return a table for examining a pickle: only instances of default classes are created, others are replaced.

    Args:
        allowed: Allow-list to check the pickle's globals against.
        named: Set that collects the full names of globals that are not on the allow-list.
    """
    functions = _census_functions()

    def find(path: str) -> Any:
        if path in functions:
            return functions[path]
        if path not in allowed.by_name:
            named.add(path)
        if path in allowed.added or path not in allowed.by_name:
            return _UNKNOWN
        return allowed.by_name[path]

    return replace(_census_base(), find=find)


@functools.cache
def _census_base() -> PickleTable:
    table = default_table()
    unknown = frozenset((_Unknown,))
    return replace(
        table,
        calls={**table.calls, id(_UNKNOWN): lambda *_: _UNKNOWN},
        news={**table.news, id(_UNKNOWN): lambda *_: _UNKNOWN},
        states={**table.states, _Unknown: lambda *_: _UNKNOWN},
        lists=table.lists | unknown,
        dicts=table.dicts | unknown,
        sets=table.sets | unknown,
    )


@functools.cache
def _census_functions() -> dict[str, Function]:
    """Return stand-ins of torch's functions for storages without values; they make no tensors that need values."""

    def subclassed(_: Callable[..., Any], __: tuple[Any, ...], cls: Any) -> Any:
        if cls is not _UNKNOWN:
            raise UnsafePickleError(f"{described(cls)} is no class of tensors that is allowed")
        return _UNKNOWN

    def lenient(name: str, call: Call) -> Call:
        def examine(budget: Budget, arguments: tuple[Any, ...]) -> Any:
            by_value = name in ("_rebuild_sparse_tensor", "_rebuild_nested_tensor")
            return _UNKNOWN if by_value or any(each is _UNKNOWN for each in arguments) else call(budget, arguments)

        return examine

    return tensor_functions(subclassed, lenient)


def how_to_allow(paths: Sequence[str], *, with_planner: bool = True) -> str:
    """Return advice for an error message about globals that are not allowed.

    Args:
        paths: Full names of the globals.
        with_planner: Whether a planner loads the object; otherwise, the caller's function has `allow_globals` itself.

    Returns:
        Text with the expression to pass as `allow_globals`, or with a warning that the globals could run any code.
    """
    never = [path for path in paths if may_never_be_allowed(path)]
    if never:
        why = " (pickles name it for methods, and for a class within a class)" if never[0] == "builtins.getattr" else ""
        return (
            f"{never[0]}{why} can run any code, and no checkpoint of plain data names it: do not load it unless you "
            "know why it does"
        )
    imports, listed = _expression(paths)
    how = (
        f"load with DefaultLoadPlanner(allow_globals=[{listed}])" if with_planner else f"pass allow_globals=[{listed}]"
    )
    text = f"If you trust it, {how} after {imports}, or call torch.serialization.add_safe_globals([{listed}]) first"
    return (
        f"{text}; trust_objects=True lifts every restriction and lets the checkpoint run code" if with_planner else text
    )


def _expression(paths: Sequence[str]) -> tuple[str, str]:
    """Return import statements, and an expression for `allow_globals`, for globals by full name."""
    imports, listed = [], []
    taken: set[str] = set()
    for path in paths:
        module, names = _split(path)
        first, _, rest = names.partition(".")
        known = first
        while known in taken:
            known = f"{module.rpartition('.')[2]}_{known}"
        taken.add(known)
        renamed = "" if known == first else f" as {known}"
        imports.append(f"`from {module} import {first}{renamed}`")
        value = f"{known}.{rest}" if rest else known
        listed.append(value if _own_path(module, names) == path else f"({value}, {path!r})")
    return " and ".join(dict.fromkeys(imports)), ", ".join(listed)


def _split(path: str) -> tuple[str, str]:
    """Split a full name into module and name; if the module is not imported yet, it is all but the last part."""
    module, _, name = path.rpartition(".")
    while module and module not in sys.modules and "." in module:
        module, _, more = module.rpartition(".")
        name = f"{more}.{name}"
    return (module, name) if module in sys.modules else path.rpartition(".")[::2]


def _own_path(module: str, names: str) -> str:
    """Return the full name to allow for an object with this module and name; the given name if it is not imported."""
    value: Any = sys.modules.get(module)
    for name in names.split("."):
        value = vars(value).get(name) if isinstance(value, types.ModuleType | type) else None
    own, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{own}.{qualified}" if own and qualified else f"{module}.{names}"
