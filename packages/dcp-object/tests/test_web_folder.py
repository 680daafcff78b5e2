"""Checkpoints on a web server are loaded by ranges, verified, and never written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core import (
    ByteStorageWriter,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DefaultLoadPlanner,
    load,
    save,
)
from dcp_core.testing.sharding import distribute
from dcp_io import LocalStore, StorageError, StoreBackend, verify_checkpoint
from dcp_object import ObjectStoreReader
from dcp_object.opening import open_store
from dcp_ranks.testing.ranks import RankPool
from integration_tests.kits.damage import flip

ROWS = 4096


class Files(SimpleHTTPRequestHandler):
    """A web server that serves files and ranges of them."""

    given = 0
    lock = threading.Lock()

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        start, stop, status = 0, len(data), 200
        asked = self.headers.get("Range")
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(len(data), int(last) + 1), 206
        self.send_response(status)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            with self.lock:  # before whoever asked goes on
                type(self).given += stop - start
            self.wfile.write(data[start:stop])

    do_HEAD = do_GET  # noqa: N815 - as the base class calls it


class FolderWriter(ByteStorageWriter):
    def _open(self, checkpoint_id: Any) -> StoreBackend:
        return StoreBackend(LocalStore(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: Files(*given, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/run/step-1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def state() -> dict[str, Any]:
    return {"w": torch.arange(ROWS * 256.0).reshape(ROWS, 256), "small": torch.ones(3), "step": 7}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "run" / "step-1"


@pytest.fixture
def url(state: dict[str, Any], tmp_path: Path, place: Path) -> Iterator[str]:
    save(state, storage_writer=FolderWriter(place))
    with serving(tmp_path) as found:
        yield found


def test_a_load_by_id_fills_the_template(url: str, state: dict[str, Any]) -> None:
    template = {"w": torch.zeros(ROWS, 256), "small": torch.zeros(3), "step": 0}
    report = load(template, checkpoint_id=url)
    assert torch.equal(template["w"], state["w"])
    assert torch.equal(template["small"], state["small"])
    assert template["step"] == 7
    assert report.unverified == ()


def test_a_part_takes_its_bytes(url: str, state: dict[str, Any]) -> None:
    part = {"w": torch.zeros(ROWS // 4, 256)}
    before = Files.given
    load(part, storage_reader=ObjectStoreReader(url), planner=DefaultLoadPlanner(allow_resize=True))
    assert torch.equal(part["w"], state["w"][: ROWS // 4])
    index = open_store(url).size(".metadata")
    assert part["w"].nbytes <= Files.given - before - index <= 1.1 * part["w"].nbytes


def test_damage_is_found(url: str, place: Path) -> None:
    assert verify_checkpoint(open_store(url)).ok
    (file,) = place.glob("*.distcp")
    flip(file)
    assert not verify_checkpoint(open_store(url)).ok
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        load({"w": torch.zeros(ROWS, 256)}, checkpoint_id=url)


def test_what_is_missing_is_named(url: str, place: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="step-2"):
        load({"w": torch.zeros(3)}, checkpoint_id=url.replace("step-1", "step-2"))
    (file,) = place.glob("*.distcp")
    file.unlink()
    with pytest.raises(CheckpointNotFoundError, match=f"{file.name}.*'w' is stored in it"):
        load({"w": torch.zeros(ROWS, 256)}, checkpoint_id=url)


def test_nothing_is_written_or_listed(url: str, place: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    with pytest.raises(StorageError, match="can be read, not written; save elsewhere"):
        save({"w": torch.ones(3)}, checkpoint_id=url)
    with pytest.raises(StorageError, match="can be read, not written; save elsewhere"):
        open_store(url).delete(".metadata")
    with pytest.raises(StorageError, match="name a checkpoint itself"):
        open_store(url).folders()
    assert [entry.name for entry in open_store(url).list()] == [".metadata"]
    assert {path.name: path.stat().st_mtime_ns for path in place.iterdir()} == before


def _rows(url: str) -> bool:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    full = torch.arange(ROWS * 256.0).reshape(ROWS, 256)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    template = {"w": distribute(torch.zeros_like(full), mesh, [Shard(0)])}
    load(template, checkpoint_id=url)
    wanted = distribute(full, mesh, [Shard(0)])
    return torch.equal(template["w"].to_local(), wanted.to_local())


def test_four_ranks(url: str, ranks: RankPool) -> None:
    assert ranks.run(4, _rows, url) == [True] * 4
