"""Store and storage pass the suites over an S3 server on loopback, without and with faults, on 1, 2 and 4 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dcp_core import load, save
from dcp_core.testing.conformance import StorageConformance
from dcp_core.testing.sharding import distribute
from dcp_io.testing import FoldersConformance, StoreConformance
from dcp_object import ObjectStoreReader, ObjectStoreWriter
from dcp_object.opening import open_store
from dcp_object.store import ObjectStore
from integration_tests.kits.fault_proxy import FaultProxy, sometimes
from integration_tests.kits.raw_bucket import RawBucket
from integration_tests.kits.s3_server import S3Server

_numbers = itertools.count()


class TestS3Store(StoreConformance, FoldersConformance):
    clock_seconds = 1.1

    @pytest.fixture
    def place(self, s3: S3Server) -> Any:
        return s3, f"object/stores/{next(_numbers)}"

    def open_store(self, place: Any, folder: str) -> ObjectStore:
        server, root = place
        return open_store(f"s3://{server.bucket}/{root}/{folder}")

    def open_raw(self, place: Any, folder: str) -> RawBucket:
        server, root = place
        return RawBucket(server, f"{root}/{folder}")


class TestS3Storage(StorageConformance):
    @pytest.fixture
    def folder(self) -> str:
        return f"object/storages/{next(_numbers)}/checkpoint"

    @pytest.fixture
    def checkpoint_id(self, s3: S3Server, folder: str) -> str:
        return f"s3://{s3.bucket}/{folder}"

    @pytest.fixture
    def raw(self, s3: S3Server, folder: str) -> RawBucket:
        return RawBucket(s3, folder)

    def make_writer(self, checkpoint_id: str) -> ObjectStoreWriter:
        return ObjectStoreWriter(checkpoint_id)

    def make_reader(self, checkpoint_id: str) -> ObjectStoreReader:
        return ObjectStoreReader(checkpoint_id)


@pytest.mark.slow
class TestS3StorageWithFaults(TestS3Storage):
    """The same tests through a proxy that lets a tenth of all requests fail; only checkpoint ids bypass the proxy."""

    @pytest.fixture
    def proxy(self, s3: S3Server) -> Iterator[FaultProxy]:
        faults = sometimes(("503", "503 after", "drop", "drop after", "truncate", "slow"), rate=0.1, seed=3)
        with FaultProxy(s3.url, faults) as proxy:
            self.endpoint = proxy.url  # of this instance, which travels to the ranks
            yield proxy

    endpoint = ""

    @pytest.fixture
    def door(self, storage: Any) -> Any:
        return storage

    @pytest.fixture
    def checkpoint_id(self, s3: S3Server, folder: str, proxy: FaultProxy) -> str:
        return f"s3://{s3.bucket}/{folder}"

    def make_writer(self, checkpoint_id: str) -> ObjectStoreWriter:
        return ObjectStoreWriter(checkpoint_id, storage_options={"endpoint": self.endpoint})

    def make_reader(self, checkpoint_id: str) -> ObjectStoreReader:
        return ObjectStoreReader(checkpoint_id, storage_options={"endpoint": self.endpoint})


def _on_ranks(checkpoint_id: str) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(300_000.0).reshape(1000, 300)
    save({"w": distribute(full, mesh, [Shard(0)])}, checkpoint_id=checkpoint_id)
    template = {"w": distribute(torch.zeros_like(full), mesh, [Shard(1)])}
    load(template, checkpoint_id=checkpoint_id)
    wanted = distribute(full, mesh, [Shard(1)])
    return torch.equal(template["w"].to_local(), wanted.to_local())


@pytest.mark.parametrize("world_size", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 4))])
def test_ranks_by_uri(ranks: Any, s3: S3Server, world_size: int) -> None:
    checkpoint_id = f"s3://{s3.bucket}/ranks/{world_size}"
    assert ranks.run(world_size, _on_ranks, checkpoint_id) == [True] * world_size
