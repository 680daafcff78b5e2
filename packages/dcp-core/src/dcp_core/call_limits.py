"""How much a stored object may make of few bytes: what a pickle calls must not give far more than the pickle holds.

An allow-list says what may be called. `bytearray(1 << 40)`, `list(range(1 << 40))` and `Fraction("1e999999999")` call
nothing but harmless classes, and fill any memory.
"""

from __future__ import annotations

import collections
import decimal
import fractions
import pickle
from collections.abc import Sized
from typing import Any

import numpy as np

__all__ = ["CallLimits"]

_FREE_BYTES = 1 << 20
_COPYING = (
    *(list, tuple, set, frozenset, dict, bytes, bytearray, str),
    *(collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque),
)
_SIZED = (bytes, bytearray)
_NUMBERS = (int, float, complex, fractions.Fraction)
_MAX_DIGITS = 4300  # as many as Python itself turns into a number


class CallLimits:
    """What calls of one pickle have copied so far; `check` is asked before each."""

    def __init__(self) -> None:
        self._copied = 0

    def check(self, func: Any, arguments: tuple[Any, ...], position: int) -> None:
        """Refuse a call that would make much of little.

        A pickle that was written from values hands each of them to one call only, so that calls copy no more elements
        than the pickle has bytes.

        Args:
            func: What is called; is on the allow-list.
            arguments: With which.
            position: Bytes of the pickle that were read.

        Raises:
            pickle.UnpicklingError: It would.
        """
        counts = any(func is number for number in _NUMBERS) or (isinstance(func, type) and issubclass(func, np.generic))
        if counts:
            _check_number(func, arguments)
        elif not any(func is copying for copying in _COPYING):
            return
        for argument in arguments:
            if isinstance(argument, range):
                raise pickle.UnpicklingError(f"a call of {func!r} with a range is not allowed")
            if func in _SIZED and isinstance(argument, int) and argument > _FREE_BYTES:
                raise pickle.UnpicklingError(f"a call of {func!r} for {argument} bytes is not allowed")
            if isinstance(argument, Sized):
                self._copied += len(argument)
        if self._copied > position + _FREE_BYTES:
            raise pickle.UnpicklingError(f"it copies {self._copied:,} elements, more than its {position:,} bytes hold")


def _check_number(func: Any, arguments: tuple[Any, ...]) -> None:
    """A number must have no more digits than it is written with."""
    for argument in arguments:
        short = isinstance(argument, str) and func is fractions.Fraction and "e" in argument.lower()
        if short or (isinstance(argument, decimal.Decimal) and abs(argument.adjusted()) > _MAX_DIGITS):
            raise pickle.UnpicklingError(f"a call of {func!r} with a number of that exponent is not allowed")
