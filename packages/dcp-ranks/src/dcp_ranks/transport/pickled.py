"""Pickling of messages between ranks of one job, which trust each other."""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["decode", "encode"]


def encode(value: Any) -> bytes:
    """Pickle a Python object for another rank of the same job."""
    return pickle.dumps(value, protocol=5)


def decode(data: bytes | bytearray) -> Any:
    """Unpickle bytes from another rank of the same job. Unsafe for bytes from any other source."""
    return pickle.loads(data)
