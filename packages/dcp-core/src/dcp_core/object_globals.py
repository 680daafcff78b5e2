"""Which globals a stored object may name: what trainers keep in checkpoints, and nothing that can do harm.

Everything here either only holds data, or builds data from its arguments. What can reach further (attributes of
arbitrary objects, files, imports, code) must never be added.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import functools
import os
import pathlib
import types
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch._weights_only_unpickler as torch_rules

__all__ = ["AllowList", "allowed_globals", "default_globals", "may_never_be_allowed"]

# torch refuses the first four even when a user lists them; the others run code or import just as well.
_NEVER_MODULES = frozenset(
    ("sys", "os", "posix", "nt", "subprocess", "shutil", "importlib", "runpy", "pickle", "_pickle", "ctypes")
)
_NEVER_NAMES = frozenset(
    f"builtins.{name}"
    for name in ("__import__", "compile", "delattr", "eval", "exec", "getattr", "globals", "open", "setattr", "vars")
) | {"io.open", "io.FileIO", "_io.open", "_io.FileIO"}


@dataclass(frozen=True, slots=True)
class AllowList:
    """The globals that an object may use; the mapping must not be changed."""

    by_name: Mapping[str, Any]
    """Full name → object."""
    callables: frozenset[int]
    """`id` of every object that may be called."""


def allowed_globals(extra: Sequence[Any] = ()) -> AllowList:
    """Every global that an object may use.

    Args:
        extra: Classes and functions that the caller allows, as for `torch.serialization.add_safe_globals`: objects, or
            pairs (object, full name). What was added there counts as well.

    Raises:
        ValueError: `extra` holds something that could run any code, such as `eval`.
    """
    return _allow_list(tuple(extra), frozenset(torch.serialization.get_safe_globals()))


def may_never_be_allowed(path: str) -> bool:
    """Whether a global of that full name could run any code, so that no allow-list takes it."""
    return path.partition(".")[0] in _NEVER_MODULES or path in _NEVER_NAMES


@functools.lru_cache(maxsize=32)
def _allow_list(extra: tuple[Any, ...], added: frozenset[Any]) -> AllowList:
    by_name = {**default_globals(), **_named(added), **_named(extra)}
    return AllowList(by_name, frozenset(id(value) for value in by_name.values() if callable(value)))


def _named(listed: Iterable[Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for entry in listed:
        own = getattr(entry[0] if isinstance(entry, tuple) else entry, "__module__", "") or ""
        value, path = entry if isinstance(entry, tuple) else (entry, f"{own}.{entry.__qualname__}")
        if may_never_be_allowed(path) or may_never_be_allowed(f"{own}.{getattr(value, '__qualname__', '')}"):
            raise ValueError(f"{path} cannot be allowed: a checkpoint could run any code with it")
        named[path] = value
    return named


@functools.cache
def default_globals() -> dict[str, Any]:
    """What needs no permission: full name → object. Not to be changed."""
    return {**torch_rules._get_allowed_globals(), **_python_globals(), **_numpy_globals()}  # noqa: SLF001


def _python_globals() -> dict[str, Any]:
    values: list[Any] = [
        *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple),
        *(collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque),
        *(dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID),
        *(argparse.Namespace, types.SimpleNamespace),
    ]
    named = {f"{value.__module__}.{value.__qualname__}": value for value in values}
    named["builtins.Ellipsis"] = ...
    # A path of the other system becomes its pure form; CPython 3.13.0 names another module.
    foreign = "PosixPath" if os.name == "nt" else "WindowsPath"
    for name in ("PurePath", "PurePosixPath", "PureWindowsPath", "Path", "PosixPath", "WindowsPath"):
        value = getattr(pathlib, f"Pure{name}" if name == foreign else name)
        named[f"pathlib.{name}"] = named[f"pathlib._local.{name}"] = value
    return named


def _numpy_globals() -> dict[str, Any]:
    named: dict[str, Any] = {"numpy.ndarray": np.ndarray, "numpy.dtype": _dtype}
    makers: dict[str, Callable[..., Any]] = {
        "multiarray._reconstruct": _empty_array,
        "multiarray.scalar": _scalar,
        "numeric._frombuffer": _array_from_buffer,
    }
    # numpy 2 renamed the module; a checkpoint may come from either.
    for path, maker in makers.items():
        named[f"numpy.core.{path}"] = named[f"numpy._core.{path}"] = maker
    for value in set(np.sctypeDict.values()):
        if not issubclass(value, np.void | np.object_):
            named[f"numpy.{value.__name__}"] = value
    return named


def _dtype(spec: Any, align: Any = False, copy: Any = False) -> np.dtype[Any]:
    """`numpy.dtype` for the specifications that its own pickles have."""
    del align, copy
    known = isinstance(spec, str) or (isinstance(spec, type) and issubclass(spec, np.generic))
    dtype: np.dtype[Any] | None = np.dtype(spec) if known else None
    if dtype is None or dtype.names or (dtype.hasobject and dtype != np.dtype(object)):
        raise ValueError(f"{spec!r} is no specification of a plain numpy dtype")
    return dtype


def _empty_array(cls: Any, shape: Any, spec: Any) -> np.ndarray[Any, Any]:
    """What `numpy._core.multiarray._reconstruct` gives for a plain array: one that waits for its state."""
    if cls is not np.ndarray or spec not in ("b", b"b") or tuple(shape) != (0,):
        raise ValueError(f"an array of class {cls!r} is not allowed")
    empty: np.ndarray[Any, Any] = np.ndarray((0,), np.int8)
    return empty


def _scalar(dtype: Any, data: Any = None) -> Any:
    """`numpy._core.multiarray.scalar` for dtypes without objects."""
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise ValueError(f"a numpy scalar of dtype {dtype!r} is not allowed")
    if isinstance(data, str):
        data = data.encode("latin1")
    if dtype.itemsize == 0:
        return np.zeros((), dtype)[()]
    if len(data) != dtype.itemsize:
        raise ValueError(f"a numpy scalar of dtype {dtype} has {len(data)} bytes of data")
    return np.frombuffer(bytes(data), dtype)[0]


def _array_from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    """`numpy._core.numeric._frombuffer` for dtypes without objects."""
    if not isinstance(dtype, np.dtype) or dtype.hasobject or order not in ("C", "F"):
        raise ValueError(f"a numpy array of dtype {dtype!r} in order {order!r} is not allowed")
    array: np.ndarray[Any, Any] = np.frombuffer(data, dtype).reshape(shape, order=order)
    return array
