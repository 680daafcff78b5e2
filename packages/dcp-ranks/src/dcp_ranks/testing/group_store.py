"""The store at which the ranks of a test meet, for what they tell each other beside what is tested."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dcp_ranks.store_connections import borrow_store

__all__ = ["group_store", "keys_of_group"]


def group_store() -> Any:
    """The store of all ranks' group, over a connection of the caller's own, which is closed when it is dropped."""
    group = dist.group.WORLD
    found = None if group is None else borrow_store(group)
    assert found is not None, "these ranks have no store"
    return found[0]


def keys_of_group() -> list[str]:
    """Every key there; none before torch 2.8, where a test of what is left says nothing."""
    store = group_store()
    return list(store.list_keys()) if hasattr(store, "list_keys") else []
