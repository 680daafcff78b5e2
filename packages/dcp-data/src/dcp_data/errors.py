"""Exceptions of saved data positions that do not fit the data."""

from __future__ import annotations

__all__ = ["PositionMismatchError"]


class PositionMismatchError(ValueError):
    """A saved position in the middle of an epoch does not fit: the data set or its order is another one now."""
