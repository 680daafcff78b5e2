"""Store and storage pass the suites with s3fs over an S3 server on loopback, without and with faults, on ranks."""

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
from dcp_fsspec import FsspecReader, FsspecWriter
from dcp_fsspec.opening import open_store
from dcp_fsspec.store import FsspecStore
from dcp_io.testing import FoldersConformance, StoreConformance
from dcp_ranks.testing.ranks import RankPool
from integration_tests.kits.fault_proxy import Fault, FaultProxy, sometimes
from integration_tests.kits.raw_bucket import RawBucket
from integration_tests.kits.s3_server import S3Server

pytest.importorskip("s3fs", reason="needs s3fs")
_numbers = itertools.count()


class TestS3Store(StoreConformance, FoldersConformance):
    clock_seconds = 1.1

    @pytest.fixture
    def place(self, s3: S3Server) -> Any:
        return s3, f"fsspec/stores/{next(_numbers)}"

    def open_store(self, place: Any, folder: str) -> FsspecStore:
        server, root = place
        return open_store(f"s3://{server.bucket}/{root}/{folder}")

    def open_raw(self, place: Any, folder: str) -> RawBucket:
        server, root = place
        return RawBucket(server, f"{root}/{folder}")


@pytest.mark.slow  # the same suite runs over memory, and over S3 without fsspec
@pytest.mark.slow  # fsspec's memory storage and dcp-object's S3 storage are judged in the short suite
class TestS3Storage(StorageConformance):
    @pytest.fixture
    def door(self, storage: Any) -> Any:
        return storage  # ids alone may go to another package

    @pytest.fixture
    def folder(self) -> str:
        return f"fsspec/storages/{next(_numbers)}/checkpoint"

    @pytest.fixture
    def checkpoint_id(self, s3: S3Server, folder: str) -> str:
        return f"s3://{s3.bucket}/{folder}"

    @pytest.fixture
    def raw(self, s3: S3Server, folder: str) -> RawBucket:
        return RawBucket(s3, folder)

    def make_writer(self, checkpoint_id: str) -> FsspecWriter:
        return FsspecWriter(checkpoint_id)

    def make_reader(self, checkpoint_id: str) -> FsspecReader:
        return FsspecReader(checkpoint_id)


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestS3StorageWithFaults(TestS3Storage):
    """The same tests through a proxy that lets a tenth of all requests fail."""

    endpoint = ""

    @pytest.fixture
    def proxy(self, s3: S3Server) -> Iterator[FaultProxy]:
        faults = sometimes(("503", "503 after", "drop", "drop after", "truncate", "slow"), rate=0.1, seed=3)
        with FaultProxy(s3.url, faults) as proxy:
            self.endpoint = proxy.url  # of this instance, which travels to the ranks
            yield proxy

    @pytest.fixture
    def checkpoint_id(self, s3: S3Server, folder: str, proxy: FaultProxy) -> str:
        return f"s3://{s3.bucket}/{folder}"

    def make_writer(self, checkpoint_id: str) -> FsspecWriter:
        return FsspecWriter(checkpoint_id, endpoint_url=self.endpoint)

    def make_reader(self, checkpoint_id: str) -> FsspecReader:
        return FsspecReader(checkpoint_id, endpoint_url=self.endpoint)


@pytest.mark.parametrize("fault", ["503 after", "drop after"])
@pytest.mark.parametrize("data", [b"", bytes(range(251))])
def test_a_new_file_whose_first_answer_is_lost(s3: S3Server, fault: Fault, data: bytes) -> None:
    """The client's retry finds the file that its first attempt made."""
    left = [fault]
    with FaultProxy(s3.url, lambda method, path: left.pop() if method == "PUT" and left else None) as proxy:
        folder = f"s3://{s3.bucket}/fsspec/lost/{next(_numbers)}"
        store = open_store(folder, storage_options={"endpoint_url": proxy.url})
        sink = store.create("x")
        sink.write([data])
        sink.close()
        assert proxy.faults[fault] == 1
        assert store.read("x") == data
        other = store.create("y")
        other.write([b"mine"])
        store.publish("y", b"its")
        with pytest.raises(FileExistsError):
            other.close()
        assert store.read("y") == b"its"


def _on_ranks(checkpoint_id: str) -> tuple[bool, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(300_000.0).reshape(1000, 300)
    state = {"w": distribute(full, mesh, [Shard(0)]), "step": 7}
    save(state, storage_writer=FsspecWriter(checkpoint_id, thread_count=2))
    template = {"w": distribute(torch.zeros_like(full), mesh, [Shard(1)]), "step": 0}
    load(template, storage_reader=FsspecReader(checkpoint_id))
    wanted = distribute(full, mesh, [Shard(1)])
    return torch.equal(template["w"].to_local(), wanted.to_local()), template["step"]


@pytest.mark.parametrize("world_size", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 4))])
def test_ranks(ranks: RankPool, s3: S3Server, world_size: int) -> None:
    checkpoint_id = f"s3://{s3.bucket}/fsspec/ranks/{world_size}"
    for _ in range(2):  # the second save replaces the first
        assert ranks.run(world_size, _on_ranks, checkpoint_id) == [(True, 7)] * world_size
    names = RawBucket(s3, f"fsspec/ranks/{world_size}").names()
    assert len({name.partition(".")[2] for name in names if name.endswith(".distcp")}) == 1
