"""Pickles of values that ranks of one job send each other; they trust each other."""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["decode", "encode"]


def encode(value: Any) -> bytes:
    """Pickle a value for another rank of the same job."""
    return pickle.dumps(value, protocol=5)


def decode(data: bytes | bytearray) -> Any:
    """Unpickle a value from another rank of the same job; bytes from elsewhere must never be passed."""
    return pickle.loads(data)
