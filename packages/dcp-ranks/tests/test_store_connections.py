"""Connections to groups' stores: with `Store.clone` and without, as before torch 2.8."""

from __future__ import annotations

import threading
import uuid
from unittest import mock

import pytest
import torch.distributed as dist

from dcp_ranks import CoordinatorLostError, make_coordinator
from dcp_ranks import store_connections as store_clones
from dcp_ranks.phases.collective_coordinator import CollectiveCoordinator
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.transport.store_wire import TimedStore


class Gone:
    """A store that ended: connecting to it takes for ever, what is connected is told at once."""

    def clone(self):
        threading.Event().wait(60)

    def check(self, keys):
        raise dist.DistNetworkError("gone")


class Refusing(Gone):
    """A store that refuses a second connection."""

    def clone(self):
        raise RuntimeError("no")

    def check(self, keys):
        return False


def test_connecting_to_a_lost_store_ends_soon():
    for store, error in ((Gone(), "cannot be reached .*gone"), (Refusing(), r"although it answers \(no\).*ulimit -n")):
        with pytest.raises(CoordinatorLostError, match=error):
            store_clones._clone(TimedStore(store, 5.0), store.clone, 120.0)


class WithoutClone:
    """A store as those of older versions of torch are."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        if name == "clone":
            raise AttributeError(name)
        return getattr(self._store, name)


def operations(group):
    """What two operations give, and by which coordinator."""
    found = []
    for _ in range(2):
        with make_coordinator(group) as them:
            found.append((type(them), them.all_gather("x", lambda: dist.get_rank())))  # noqa: PLW0108 - bound late
    return found


def old_torch(call):
    given = store_clones.distributed_c10d._get_process_group_store
    with mock.patch.object(
        store_clones.distributed_c10d, "_get_process_group_store", lambda group: WithoutClone(given(group))
    ):
        return call()


def over_new_groups():
    everybody, some = dist.new_group(), dist.new_group([1, 2])
    found = old_torch(lambda: operations(everybody))
    return found, old_torch(lambda: operations(some)) if dist.get_rank() in (1, 2) else None


def test_groups_without_clones_have_stores_of_their_own(ranks):
    for rank, (found, among_some) in enumerate(ranks.run(3, over_new_groups)):
        assert found == [(StoreCoordinator, [0, 1, 2])] * 2
        assert among_some == (None if rank == 0 else [(StoreCoordinator, [1, 2])] * 2)


def over_a_file(path):
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        return old_torch(lambda: operations(dist.group.WORLD))
    finally:
        dist.barrier()
        dist.destroy_process_group()


def test_a_file_without_clones_gets_collectives(ranks, tmp_path):
    assert ranks.run(2, over_a_file, str(tmp_path / uuid.uuid4().hex)) == [[(CollectiveCoordinator, [0, 1])] * 2] * 2
    ranks.run(1, dist.is_initialized, backend=None)  # the pool's own group is gone
