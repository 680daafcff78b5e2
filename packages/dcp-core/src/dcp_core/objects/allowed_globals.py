"""Allow-list of the globals (classes and functions) that a stored object's pickle may name.

The defaults only hold or build data; `*_calls` have the rules for calling them. A global without a rule is not called.
Never add globals that give access to arbitrary attributes, files, imports or code.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import inspect
import os
import pathlib
import sys
import types
import warnings
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
    Opaque,
    PickleTable,
    UnsafePickleError,
    described,
)

# torch always refuses the first four; the others also run code or import.
_NEVER_MODULES = frozenset(
    ("sys", "os", "posix", "nt", "subprocess", "shutil", "importlib", "runpy", "pickle", "_pickle", "ctypes")
)
_NEVER_NAMES = frozenset(
    f"builtins.{name}"
    for name in ("__import__", "compile", "delattr", "eval", "exec", "getattr", "globals", "open", "setattr", "vars")
) | {"io.open", "io.FileIO", "_io.open", "_io.FileIO"}


_LISTS, _DICTS, _SETS = (list, collections.deque), (dict, collections.OrderedDict), (set,)
_DICT_TYPES = frozenset((*_DICTS, collections.defaultdict, collections.Counter))

_TORCHAO = (
    *("torchao.optim", "torchao.float8", "torchao.float8.fsdp_utils"),
    *("torchao.quantization", "torchao.prototype.mx_formats"),
)

CLASS_METHOD = "builtins.getattr"
_METHOD = "_make_in_reduce_ex"
"""Class method that rebuilds TransformerEngine's tensors."""


@dataclass(frozen=True, slots=True)
class AllowList:
    """Immutable allow-list."""

    by_name: Mapping[str, Any]
    """Full name → global, or a checked replacement."""
    added: frozenset[str]
    """Full names that only the user allows, called with any arguments."""
    table: PickleTable


def allowed_globals(extra: Sequence[Any] = ()) -> AllowList:
    """Return the defaults, torch's safe globals and `extra`; defaults keep their restrictions.

    ValueError: a function in `extra` could run any code.
    """
    return _allow_list(tuple(extra), frozenset(torch.serialization.get_safe_globals()))


def may_never_be_allowed(path: str) -> bool:
    """Return whether a global could run any code."""
    return path.partition(".")[0] in _NEVER_MODULES or path in _NEVER_NAMES


def default_allow_list() -> AllowList:
    """Return the allow-list without users' globals."""
    return _allow_list((), frozenset())


def register_library(path: str) -> bool:
    """Import torchao's modules for a global, and return whether they have it."""
    if path.partition(".")[0] != "torchao" or importlib.util.find_spec("torchao") is None:
        return False
    for module in _TORCHAO:
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    return path in allowed_globals().by_name


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
    if tensors := [value for value in users if _rebuilds_by_method(value)]:
        by_name[CLASS_METHOD] = _class_method_of(tensors)
    return AllowList(by_name, frozenset(named), _with_users(default_table(), by_name, users))


def _rebuilds_by_method(value: Any) -> bool:
    is_tensor = isinstance(value, type) and issubclass(value, torch.Tensor)
    return is_tensor and isinstance(inspect.getattr_static(value, _METHOD, None), classmethod)


def _class_method_of(tensors: Sequence[Any]) -> Function:
    def find(_: Budget, arguments: tuple[Any, ...]) -> Function:
        cls, name = arguments
        if name != _METHOD or not any(cls is each for each in tensors):
            raise ForbiddenGlobalError(CLASS_METHOD)
        return Function(f"{cls.__qualname__}.{name}", lambda _, given: getattr(cls, _METHOD)(*given))

    return Function(CLASS_METHOD, find)


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
    """Return the calls, states and constants of defaults."""
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
    """Return full name → global, or a checked replacement. Read-only."""

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
    # A path class of another system becomes its pure form; CPython 3.13.0 uses another module name.
    foreign = "PosixPath" if os.name == "nt" else "WindowsPath"
    for name in ("PurePath", "PurePosixPath", "PureWindowsPath", "Path", "PosixPath", "WindowsPath"):
        value = getattr(pathlib, f"Pure{name}" if name == foreign else name)
        named[f"pathlib.{name}"] = named[f"pathlib._local.{name}"] = value
    return named


def census_table(allowed: AllowList, named: set[str]) -> PickleTable:
    """Return a table that adds refused globals to `named`."""
    functions = _census_functions()

    def method(_: Budget, arguments: tuple[Any, ...]) -> Any:
        if [type(each) for each in arguments[:1]] != [Opaque] or arguments[1:] != (_METHOD,):
            named.add(CLASS_METHOD)
        return Opaque(CLASS_METHOD)

    def find(path: str) -> Any:
        if path in functions:
            return functions[path]
        if path == CLASS_METHOD and path in allowed.by_name:
            return Function(path, method)
        if path not in allowed.by_name:
            named.add(path)
        if path in allowed.added or path not in allowed.by_name:
            return Opaque(path)
        return allowed.by_name[path]

    return replace(default_table(), find=find)


@functools.cache
def _census_functions() -> dict[str, Function]:
    def subclassed(_: Callable[..., Any], __: tuple[Any, ...], cls: Any) -> Any:
        if type(cls) is not Opaque:
            raise UnsafePickleError(f"{described(cls)} is not an allowed class of tensors")
        return cls

    def lenient(name: str, call: Call) -> Call:
        def examine(budget: Budget, arguments: tuple[Any, ...]) -> Any:
            by_value = name in ("_rebuild_sparse_tensor", "_rebuild_nested_tensor")
            unknown = by_value or any(type(each) is Opaque for each in arguments)
            return Opaque(name) if unknown else call(budget, arguments)

        return examine

    return tensor_functions(subclassed, lenient)


def how_to_allow(paths: Sequence[str], *, with_planner: bool = True) -> str:
    """Return advice for an error message."""
    never = [path for path in paths if may_never_be_allowed(path)]
    if never:
        why = " (pickles name it for methods, and for a class within a class)" if never[0] == "builtins.getattr" else ""
        return (
            f"{never[0]}{why} can run any code, and no checkpoint of plain data names it: do not load it unless you "
            "know why it does"
        )
    imports, listed = as_expression(paths)
    how = (
        f"load with DefaultLoadPlanner(allow_globals=[{listed}])" if with_planner else f"pass allow_globals=[{listed}]"
    )
    text = f"If you trust it, {how} after {imports}, or call torch.serialization.add_safe_globals([{listed}]) first"
    return (
        f"{text}; trust_objects=True lifts every restriction and lets the checkpoint run code" if with_planner else text
    )


def as_expression(paths: Sequence[str]) -> tuple[str, str]:
    """Return imports and an `allow_globals` expression."""
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
    module, _, name = path.rpartition(".")
    while module and module not in sys.modules and "." in module:
        module, _, more = module.rpartition(".")
        name = f"{more}.{name}"
    return (module, name) if module in sys.modules else path.rpartition(".")[::2]


def _own_path(module: str, names: str) -> str:
    value: Any = sys.modules.get(module)
    for name in names.split("."):
        value = vars(value).get(name) if isinstance(value, types.ModuleType | type) else None
    own, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{own}.{qualified}" if own and qualified else f"{module}.{names}"
