"""Connecting to a `torch.distributed` store by host and port, and adding or removing a store's prefix of keys."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from dcp_ranks.transport.chunked_store import KeyValueStore

__all__ = ["STORE_TIMEOUT", "connect_store", "innermost_store", "prefixed_store"]

STORE_TIMEOUT = timedelta(seconds=30)
"""Timeout for connecting to a store, and for requests over the new connection."""


def connect_store(host: str, port: int) -> KeyValueStore:
    """Open a new connection to a running `TCPStore`. Raises RuntimeError, as torch does, if no server answers."""
    made: Any = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, False, timeout=STORE_TIMEOUT, wait_for_workers=False
    )
    return cast("KeyValueStore", made)


def prefixed_store(prefix: str, store: Any) -> KeyValueStore:
    """Return a store that adds a prefix to each key and accesses `store`."""
    made: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return cast("KeyValueStore", made)


def innermost_store(store: Any) -> Any:
    """Return the store inside all nested `PrefixStore`s; a store without a prefix is returned unchanged."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return store
