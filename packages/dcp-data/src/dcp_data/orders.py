"""Orders of a data set: which element is at which position of an epoch. Looking up a position needs no other one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["Listed", "Order", "Sequential"]


class Order(Protocol):
    """Order of one epoch."""

    length: int

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the elements at `positions` (int64, from 0 to `length` − 1), as int64."""
        ...


class Sequential:
    """The elements one after the other."""

    def __init__(self, length: int) -> None:
        self.length = length

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the elements at `positions`, which are the same numbers."""
        return positions


class Listed:
    """Elements that a sequence or tensor lists."""

    def __init__(self, elements: Sequence[int] | torch.Tensor) -> None:
        self.length = len(elements)
        self._elements = elements.to("cpu", torch.int64) if isinstance(elements, torch.Tensor) else elements

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the elements at `positions`, as int64."""
        if isinstance(self._elements, torch.Tensor):
            return self._elements[positions]
        found = [int(self._elements[each]) for each in positions.tolist()]
        return torch.tensor(found, dtype=torch.int64, device="cpu")
