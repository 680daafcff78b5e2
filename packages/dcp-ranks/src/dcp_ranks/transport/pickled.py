"""Values as bytes between ranks of one job, which trust each other: pickles."""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["decode", "encode"]


def encode(value: Any) -> bytes:
    """Bytes of a value for another rank of the same job."""
    return pickle.dumps(value, protocol=5)


def decode(data: bytes | bytearray) -> Any:
    """The value that another rank of the same job encoded."""
    return pickle.loads(data)
