"""The fast S3 server is one, for several clients; the benchmark over it runs, and measures what it says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_io.testing import FoldersConformance, StoreConformance
from dcp_io.testing.folder import read_range
from dcp_object.opening import open_store
from dcp_object.store import ObjectStore
from integration_tests.benchmarks import object_store
from integration_tests.benchmarks.loopback_s3 import LoopbackS3
from integration_tests.benchmarks.object_store_sides import ALONE, CONNECTOR, OURS, STOCK
from integration_tests.kits.raw_bucket import RawBucket

pytest.importorskip("boto3", reason="needs boto3")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[LoopbackS3]:
    running = LoopbackS3()
    with running, running.in_environment():
        yield running


@pytest.mark.slow
class TestServer(StoreConformance, FoldersConformance):
    """Two clients, obstore and boto3, see the same objects."""

    @pytest.fixture
    def place(self, server: LoopbackS3) -> Any:
        return server, f"stores/{next(_numbers)}"

    def open_store(self, place: Any, folder: str) -> ObjectStore:
        server, root = place
        return open_store(f"s3://{server.bucket}/{root}/{folder}")

    def open_raw(self, place: Any, folder: str) -> RawBucket:
        server, root = place
        return RawBucket(server, f"{root}/{folder}")


@pytest.mark.slow
def test_uploads_in_parts(server: LoopbackS3) -> None:
    store = open_store(f"s3://{server.bucket}/parts", part_bytes=5 << 20)
    data = bytes(range(251)) * (12 << 20 >> 7)
    sink = store.create("x")
    sink.write([data])
    sink.close()
    assert store.size("x") == len(data)
    part = bytearray(11 << 20)
    read_range(store, "x", 1 << 20, memoryview(part))
    assert part == data[1 << 20 : 12 << 20]


@pytest.mark.slow
@pytest.mark.parametrize("server_name", ["loopback", "moto"])
def test_the_benchmark_runs(server_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    begin = "<!-- figures: python -m integration_tests.benchmarks.object_store -->"
    page.write_text(f"before\n{begin}\n<!-- end of figures -->\nafter\n")
    arguments = ["16", "1", "--here", "--server", server_name, "--json", str(figures), "--page", str(page)]
    assert object_store.main(arguments) == 0
    found = json.loads(figures.read_text())
    assert {ALONE, OURS, STOCK} < {*found["seconds"]}
    assert CONNECTOR not in found["seconds"]
    assert 1 <= found["read / needed"] <= object_store.MOST_READ
    for operation in ("save", "load"):
        assert all(len(seconds[operation]) == 1 for seconds in found["seconds"].values())
        assert found["our throughput / theirs"][operation][STOCK] > 0
        assert 0 < found["MiB above the state"][operation] <= object_store.MOST_MIB[operation]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert f"| {OURS} |" in text
    assert f"| {OURS} |" in capsys.readouterr().out
