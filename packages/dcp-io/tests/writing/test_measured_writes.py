"""Measured writes have the locations and sizes of real ones, and leave large payloads alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dcp_io.requests import Payload, WriteRequest
from dcp_io.stores.local_store import LocalStore
from dcp_io.writing.write_engine import measure_items, write_items
from dcp_manifest.index.columns import Framing


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
    measured = measure_items(requests(lambda size: Untouched(size) if size > 65536 else bytes(size)), **options)
    assert measured.files == real.files
    columns, others = real.columns, measured.columns
    for name in ("file", "offset", "length", "lead", "stored_bytes", "framing"):
        assert getattr(columns, name).tolist() == getattr(others, name).tolist()
    assert len(columns.running_crcs) == len(others.running_crcs)
    for number, name in enumerate(measured.files):
        ends = (others.offset + others.length)[others.file == number]
        assert ends.max() == os.path.getsize(tmp_path / name)


def test_nothing_makes_no_files() -> None:
    options: dict[str, Any] = {"layout": "raw", "threads": 2, "single_file": True}
    assert measure_items([], prefix="__0_", save_id="s", **options).files == ()
