"""Ranks in virtual time send what real ranks send: requests, bytes and files of a save are equal."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed

from dcp_core import ByteStorageWriter, save
from dcp_core.planning.plan_exchange import GLOBAL_PLANS, RANK_PLANS
from dcp_core.records.metadata import TensorProperties
from dcp_core.shards.shards import LocalShard, LocalTensor
from dcp_core.testing.rehearsal.world import Cluster, VirtualWriter, World
from dcp_io import LocalStore, StoreBackend
from dcp_ranks.choose_coordinator import assume_job_size
from dcp_ranks.phases import store_phase
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from integration_tests.benchmarks.coordination import CountingStore
from integration_tests.launcher import launcher_store

torch_dist: Any = torch.distributed  # whose stores its types do not export
PLACE = "/run/step-1"
PHASES = 3


def state(rank: int, ranks: int) -> dict[str, Any]:
    """Ten tensors that are cut by rows, two replicated ones and an object."""
    made: dict[str, Any] = {"step": 100, "a.bias": torch.ones(300), "b.bias": torch.zeros(7, dtype=torch.int64)}
    for number in range(10):
        rows = torch.full((3, 50 + number), float(rank))
        shard = LocalShard(torch.Size((3 * rank, 0)), rows.shape, lambda rows=rows: rows)  # type: ignore[misc]
        size = torch.Size((3 * ranks, 50 + number))
        made[f"layer.{number}"] = LocalTensor(size, TensorProperties(rows.dtype), False, (shard,))
    return made


def virtually(ranks: int) -> tuple[list[int], list[int], dict[str, int]]:
    world = World(Cluster(ranks))
    for task in world.run(lambda rank: save(state(rank, ranks), storage_writer=VirtualWriter(world, PLACE))):
        assert task.error is None
    traffic = world.network.traffic
    files = {path: len(file.data) for path, file in world.disk.files.items()}
    return [one.requests - one.deletions for one in traffic], [one.set_bytes for one in traffic], data_files(files)


def data_files(sizes: dict[str, int]) -> dict[str, int]:
    """Bytes of each rank's file; the index holds a time, whose length varies."""
    return {name.rpartition("/")[2].partition(".")[0]: size for name, size in sizes.items() if name.endswith(".distcp")}


def really(ranks: int, folder: Path) -> tuple[list[int], list[int], dict[str, int]]:
    """Each rank is a thread with a connection to a real `TCPStore`; the files are real, too."""
    here, server = threading.local(), launcher_store()
    connections = [torch_dist.TCPStore("127.0.0.1", server.port, None, is_master=False) for _ in range(ranks)]
    stores = [CountingStore(connection) for connection in connections]
    for store, connection in zip(stores, connections, strict=True):
        store.delete_key = connection.delete_key  # not counted: which keys are left depends on the last rank to close

    class FolderWriter(ByteStorageWriter):
        def _open(self, checkpoint_id: Any) -> StoreBackend:
            del checkpoint_id
            return StoreBackend(LocalStore(folder))

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return True

    def coordinator(*_: Any, **__: Any) -> StoreCoordinator:
        return StoreCoordinator(stores[here.rank], here.rank, ranks, hosts_store=here.rank == 0)

    def run(rank: int) -> None:
        here.rank = rank
        with assume_job_size(ranks):
            save(state(rank, ranks), storage_writer=FolderWriter(PLACE))

    for cache in (GLOBAL_PLANS, RANK_PLANS):
        cache.clear()
    with (
        mock.patch("dcp_core.saving.make_coordinator", coordinator),
        mock.patch.object(store_phase, "_COUNT_SECONDS", 1e3),  # a busy machine takes no further requests
        ThreadPoolExecutor(ranks) as pool,
    ):
        list(pool.map(run, range(ranks)))
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    return [store.counts[0] for store in stores], [store.counts[1] for store in stores], data_files(files)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_virtual_ranks_send_and_write_what_real_ones_do(ranks: int, tmp_path: Path) -> None:
    requests, set_bytes, files = virtually(ranks)
    real_requests, real_bytes, real_files = really(ranks, tmp_path)
    assert files == real_files
    # The last rank to arrive says so, with one byte: it may be any rank.
    assert sum(set_bytes) == sum(real_bytes)
    assert sum(requests) == sum(real_requests)
    assert max(abs(one - real) for one, real in zip(set_bytes, real_bytes, strict=True)) <= PHASES
