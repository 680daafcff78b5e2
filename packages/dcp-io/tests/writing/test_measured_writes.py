"""Measured writes have the sizes of real ones, and leave large payloads alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dcp_io.engine import StoreBackend
from dcp_io.requests import Payload, WriteRequest
from dcp_io.stores.local_store import LocalStore
from dcp_io.writing.measured_writes import MeasuringStore
from dcp_io.writing.write_engine import write_items
from dcp_manifest.errors import CheckpointNotFoundError
from dcp_manifest.index.items import Framing


def requests(data: Any) -> list[WriteRequest]:
    """Small and large tensors, empty ones, and objects of both kinds of size."""
    sizes = [0, 4, 4000, 100_000, 5 << 20, 3]
    made = [
        WriteRequest(f"t{n}", size, lambda size=size: Payload(data(size), Framing.RAW, "uint8", (size,)))
        for n, size in enumerate(sizes)
    ]
    return made + [
        WriteRequest(f"o{size}", size, lambda size=size: Payload(bytes(size), Framing.OBJECT)) for size in (9, 200_000)
    ]


class Untouched:
    """A payload that must not be read."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def pieces(self, max_bytes: int) -> Any:
        pytest.fail("read")


@pytest.mark.parametrize("layout", ["torch", "raw"])
@pytest.mark.parametrize("single_file", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_sizes_are_those_of_files(tmp_path: Path, layout: Any, single_file: bool, threads: int) -> None:
    options: dict[str, Any] = {"prefix": "__0_", "save_id": "s", "layout": layout, "threads": threads}
    options["single_file"] = single_file
    real = write_items(LocalStore(tmp_path), requests(bytes), **options)
    store = MeasuringStore("anywhere")
    measured = write_items(store, requests(lambda size: Untouched(size) if size > 65536 else bytes(size)), **options)
    assert {each.name: each.bytes for each in store.list()} == {
        name: os.path.getsize(tmp_path / name) for name in os.listdir(tmp_path)
    }
    columns, others = real.columns, measured.columns
    assert columns.offset.tolist() == others.offset.tolist()
    assert columns.length.tolist() == others.length.tolist()
    assert len(columns.running_crcs) == len(others.running_crcs)


def test_a_whole_save_leaves_data_and_index_in_a_measuring_store(tmp_path: Path) -> None:
    backend = StoreBackend(LocalStore(tmp_path / "step-1"), layout="raw").measuring()
    save_id = backend.begin_save(overwrite=True)
    stored = backend.write(requests(bytes), prefix="__0_", save_id=save_id)
    backend.publish(".metadata", b"index")
    backend.finish_save(stored.files)
    assert sorted(each.name for each in backend.store.list()) == sorted([".metadata", *stored.files])
    assert not (tmp_path / "step-1").exists()


def test_an_aborted_save_publishes_nothing_in_a_measuring_store() -> None:
    backend = StoreBackend(MeasuringStore("a")).measuring()
    save_id = backend.begin_save(overwrite=True)
    backend.write(requests(bytes), prefix="__0_", save_id=save_id)
    backend.abort_save()
    with pytest.raises(CheckpointNotFoundError):
        backend.store.read(".metadata")
