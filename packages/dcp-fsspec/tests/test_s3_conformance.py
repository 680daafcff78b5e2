"""Store and storage pass the suites with s3fs over an S3 server on loopback, without and with faults, on ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from dcp_core.testing.conformance import StorageConformance
from dcp_fsspec import FsspecReader, FsspecStore, FsspecWriter, open_store
from dcp_io.testing import StoreConformance
from dcp_io.testing.fault_proxy import FaultProxy, sometimes
from dcp_io.testing.s3_server import CREDENTIALS, S3Server

pytest.importorskip("s3fs", reason="needs s3fs")
_numbers = itertools.count()


class RawBucket:
    """A folder of the bucket, past the store and any proxy."""

    def __init__(self, server: S3Server, folder: str) -> None:
        key, secret, region = CREDENTIALS.values()
        self._bucket = boto3.resource(
            "s3", endpoint_url=server.url, aws_access_key_id=key, aws_secret_access_key=secret, region_name=region
        ).Bucket(server.bucket)
        self._folder = f"{folder}/"

    def names(self) -> list[str]:
        return [each.key[len(self._folder) :] for each in self._bucket.objects.filter(Prefix=self._folder)]

    def get(self, name: str) -> bytes:
        data: bytes = self._bucket.Object(self._folder + name).get()["Body"].read()
        return data

    def put(self, name: str, data: bytes) -> None:
        self._bucket.put_object(Key=self._folder + name, Body=data)

    def delete(self, name: str) -> None:
        self._bucket.Object(self._folder + name).delete()


class TestS3Store(StoreConformance):
    clock_seconds = 1.1

    @pytest.fixture
    def place(self, s3: S3Server) -> Any:
        return s3, f"stores/{next(_numbers)}"

    def open_store(self, place: Any, folder: str) -> FsspecStore:
        server, root = place
        return open_store(f"s3://{server.bucket}/{root}/{folder}")

    def open_raw(self, place: Any, folder: str) -> RawBucket:
        server, root = place
        return RawBucket(server, f"{root}/{folder}")


class TestS3Storage(StorageConformance):
    @pytest.fixture
    def door(self, storage: Any) -> Any:
        return storage  # ids alone may go to another package

    @pytest.fixture
    def folder(self) -> str:
        return f"storages/{next(_numbers)}/checkpoint"

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
class TestS3StorageWithFaults(TestS3Storage):
    """The same through a proxy that lets a tenth of all requests fail."""

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
