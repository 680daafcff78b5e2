"""Connection to the TCPStore of a test's process group, for messages between ranks without the code under test."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dcp_ranks.store_connections import borrow_store

__all__ = ["group_store", "keys_of_group"]


def group_store() -> Any:
    """Open a new connection to the default group's store, which closes when the returned object is deleted."""
    group = dist.group.WORLD
    found = None if group is None else borrow_store(group)
    assert found is not None, "these ranks have no store"
    return found[0].underlying_store


def keys_of_group() -> list[str]:
    """Return all keys in the default group's store; an empty list before torch 2.8, which cannot list keys."""
    store = group_store()
    return list(store.list_keys()) if hasattr(store, "list_keys") else []
