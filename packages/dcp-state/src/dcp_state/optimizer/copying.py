"""Copies and comparisons of optimizer state, and isolated deep copies of an optimizer's plain data.

Isolated copies share no mutable object with the original, and run no code of its classes. Objects that may not be
harmless (modules, other optimizers, process groups, handles) are refused.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dcp_core.tensors.kinds import clone_tensor, is_dtensor


def copy_value(value: Any) -> Any:
    """Return a copy that shares no memory."""
    if isinstance(value, torch.Tensor):
        return clone_tensor(value)
    if isinstance(value, dict):
        return {name: copy_value(each) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copy_value, value))
    if isinstance(value, deque):
        return deque(map(copy_value, value), value.maxlen)
    if isinstance(value, list | tuple):
        return type(value)(copy_value(each) for each in value)
    return value


def same_value(one: Any, other: Any) -> bool:
    """Return whether values are equal; of sharded tensors, only this rank's shards are compared."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _same_tensor(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_value(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, int | float | complex | str | bytes):
        return bool(one == other or (one != one and other != other))  # noqa: PLR0124 - not a number
    return True  # objects that say nothing of values


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if is_dtensor(one) and is_dtensor(other):
        one, other = one.to_local(), other.to_local()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    other = other.to(one.device)
    return bool(torch.equal(one, other) or ((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124


_IMMUTABLE = (
    type(None), bool, int, float, complex, str, bytes, range, type, types.ModuleType, enum.Enum, type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_SEQUENCES = (list, set, frozenset, deque)


class IsolatedCopies:
    """Copies an object with several references once."""

    def __init__(self, known: list[tuple[Any, Any]]) -> None:
        self._copies = {id(original): made for original, made in known}
        self._kept = [original for original, _ in known]  # an id is one object's as long as that lives

    def copy(self, value: Any) -> Any:
        """Return an isolated copy, or an immutable value itself; TypeError if that is impossible."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, _IMMUTABLE):
            return value
        made = self._make(value)
        self._copies[id(value)] = made
        self._kept.append(value)
        return made

    def _make(self, value: Any) -> Any:
        if isinstance(value, nn.Module | torch.optim.Optimizer):
            raise TypeError(type(value).__name__)
        if type(value) in _SEQUENCES:
            return type(value)(map(self.copy, value))
        makers: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
            (torch.Tensor, _tensor),
            (torch.Generator, torch.Generator.clone_state),
            (dict, self._mapping),
            (tuple, self._tuple),
            ((types.FunctionType, types.MethodType, types.BuiltinFunctionType), self._callable),
        )
        make = next((make for kinds, make in makers if isinstance(value, kinds)), self._object)
        return make(value)

    def _mapping(self, value: dict[Any, Any]) -> Any:
        pairs = ((self.copy(key), self.copy(each)) for key, each in value.items())
        if type(value) is defaultdict:
            return defaultdict(self.copy(value.default_factory), pairs)
        if type(value) in (dict, OrderedDict):
            return type(value)(pairs)
        raise TypeError(type(value).__name__)

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        if type(value) is tuple:
            return tuple(map(self.copy, value))
        if hasattr(type(value), "_fields"):
            return tuple.__new__(type(value), map(self.copy, value))
        raise TypeError(type(value).__name__)

    def _callable(self, value: Any) -> Any:
        """Copy a function's closure; bind a method of a copied object to the copy."""
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copy(value.__self__))
        if isinstance(value, types.BuiltinFunctionType):
            if value.__self__ is None or isinstance(value.__self__, types.ModuleType):
                return value
            raise TypeError(value.__qualname__)
        if value.__closure__ is None and not value.__defaults__ and not value.__kwdefaults__ and not vars(value):
            return value
        cells = tuple(types.CellType(self.copy(cell.cell_contents)) for cell in value.__closure__ or ())
        made = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, self.copy(value.__defaults__), cells or None
        )
        made.__kwdefaults__ = self.copy(value.__kwdefaults__)
        return made

    def _object(self, value: Any) -> Any:
        kind = type(value)
        try:
            made = object.__new__(kind)
            attributes, into = (object.__getattribute__(each, "__dict__") for each in (value, made))
        except (TypeError, AttributeError):
            raise TypeError(kind.__name__) from None
        if any(_slots(kind)):
            raise TypeError(kind.__name__)
        self._copies[id(value)] = made
        into.update({name: self.copy(each) for name, each in attributes.items()})
        return made


def _tensor(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


def _slots(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        yield from (name for name in vars(each).get("__slots__", ()) if name not in ("__dict__", "__weakref__"))
