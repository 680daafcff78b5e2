"""Stores of `torch.distributed` from outside: under a prefix, without their prefixes, over a new connection."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from dcp_ranks.transport.chunked_store import KeyValueStore

__all__ = ["STORE_TIMEOUT", "connect_store", "innermost_store", "prefixed_store"]

STORE_TIMEOUT = timedelta(seconds=30)
"""Timeout for connecting, and for a `get` of a key that should exist."""


def connect_store(host: str, port: int) -> KeyValueStore:
    """Connect to a running `TCPStore`, for the caller alone. Raises torch's error if none is there."""
    made: Any = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, False, timeout=STORE_TIMEOUT, wait_for_workers=False
    )
    return cast("KeyValueStore", made)


def prefixed_store(prefix: str, store: Any) -> KeyValueStore:
    """Return a store whose keys are those of `store` under a prefix."""
    made: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return cast("KeyValueStore", made)


def innermost_store(store: Any) -> Any:
    """Return the store below all prefixes."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return store
