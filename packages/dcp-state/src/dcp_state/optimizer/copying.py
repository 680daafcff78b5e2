"""Copies and comparisons of optimizer state: tensors, and containers of tensors."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from dcp_core.toolkit import is_dtensor

__all__ = ["copy_value", "same_value"]


def copy_value(value: Any) -> Any:
    """Return a copy of a value in optimizer state that shares no memory with the original."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
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
    """Whether two values in optimizer state are equal; of sharded tensors, only this rank's shards are compared."""
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
