"""Indexes that lie about where things are and how many: nothing outside the folder is read, nothing huge is allocated.

Outside of the folder lies a file that would do perfectly well, so that whoever follows a path out of it succeeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dcp_all as dcp
from dcp_core.errors import CorruptCheckpointError, NotEnoughMemoryError, UnsafeCheckpointError
from dcp_io import LocalStore, verify_checkpoint
from dcp_manifest.index.columns import CheckpointIndex
from integration_tests.robustness.crafted import (
    METADATA,
    archive,
    edited_columns,
    edited_index,
    little_memory,
    saved,
    stock_checkpoint,
    stock_index,
    with_chunk,
)

HUGE = 1 << 40
TENSOR = torch.arange(6.0)
BYTES = saved(TENSOR)
REFUSALS = (UnsafeCheckpointError, CorruptCheckpointError)


def load(folder: Path, size: int = 6) -> torch.Tensor:
    template = {"t": torch.zeros(size)}
    dcp.load(template, storage_reader=dcp.FileSystemReader(folder, thread_count=1), no_dist=True)
    return template["t"]


def refused(folder: Path, kinds: tuple[type[Exception], ...], *, verified: bool = True) -> Exception:
    """The refusal of a load into a template. A load without one, and verification, are as careful."""
    with little_memory():
        with pytest.raises(kinds) as found:
            load(folder)
        with pytest.raises((*kinds, NotEnoughMemoryError)):
            dcp.load_keys(storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        assert verified != verify_checkpoint(LocalStore(folder)).ok
    return found.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of ours: a tensor `t` of six numbers, in one raw file; a good file for it lies outside."""
    folder = tmp_path / "root" / "checkpoint"
    dcp.save({"t": TENSOR}, storage_writer=dcp.FileSystemWriter(folder, layout="raw"), no_dist=True)
    (tmp_path / "root" / "outside").write_bytes(TENSOR.numpy().tobytes())
    return folder


PATHS = [
    "../outside", "x/../../outside", "./../outside", "/OUTSIDE", "..", ".", "", "x//y", "..\\outside", "C:outside",
    "a\0b", "x/..", "/etc/passwd", "sub/../../outside",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_paths_that_lead_out(folder: Path, path: str, writer: str) -> None:
    outside = folder.parent / "outside"
    path = path.replace("/OUTSIDE", str(outside))
    if writer == "ours":
        edited_index(folder, lambda index: replace(index, files=(path,)))
    else:
        outside.write_bytes(BYTES)
        stock_index(folder, {"t": ((6,), [((0,), (6,))])}, [], {("t", (0,)): (path, 0, len(BYTES))})
    error = refused(folder, (UnsafeCheckpointError,))
    assert METADATA in str(error)
    assert repr(path) in str(error)


def link_the_file(folder: Path, name: str) -> str:
    (folder / name).unlink()
    (folder / name).symlink_to(folder.parent / "outside")
    return name


def link_relatively(folder: Path, name: str) -> str:
    (folder / name).unlink()
    (folder / name).symlink_to("../outside")
    return name


def link_twice(folder: Path, name: str) -> str:
    (folder / "first").symlink_to(folder.parent / "outside")
    (folder / name).unlink()
    (folder / name).symlink_to("first")
    return name


def link_a_folder(folder: Path, name: str) -> str:
    (folder / "sub").symlink_to(folder.parent)
    (folder / name).unlink()
    return "sub/outside"


def put_a_pipe(folder: Path, name: str) -> str:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    return name


def put_a_folder(folder: Path, name: str) -> str:
    (folder / name).unlink()
    (folder / name).mkdir()
    return name


LINKS = [link_the_file, link_relatively, link_twice, link_a_folder, put_a_pipe, put_a_folder]


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.__name__)
def test_links_that_lead_out(folder: Path, link: Callable[[Path, str], str]) -> None:
    (name,) = (path.name for path in folder.glob("*.distcp"))
    other = link(folder, name)
    edited_index(folder, lambda index: replace(index, files=(other,)))
    assert name in str(refused(folder, (UnsafeCheckpointError,))) or other != name


def test_links_that_stay_inside(folder: Path) -> None:
    (path,) = folder.glob("*.distcp")
    path.rename(folder / "elsewhere")
    path.symlink_to("elsewhere")
    assert torch.equal(load(folder), TENSOR)


@pytest.mark.parametrize("name", [".metadata", "__0.metadata"])
def test_index_that_is_a_link(folder: Path, name: str) -> None:
    (folder / METADATA).rename(folder.parent / "index")
    (folder / name).symlink_to(folder.parent / "index")
    with pytest.raises(dcp.DcpError):
        load(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(dcp.DcpError):
        load(folder)


def item(**columns: Any) -> Callable[[CheckpointIndex], CheckpointIndex]:
    return lambda index: with_chunk(index, **columns)


def tensor(**columns: Any) -> Callable[[CheckpointIndex], CheckpointIndex]:
    return lambda index: replace(index, **{name: np.array(value) for name, value in columns.items()})


def huge_everything(index: CheckpointIndex) -> CheckpointIndex:
    return with_chunk(
        tensor(tensor_shape=[HUGE], chunk_sizes=[HUGE])(index), stored_bytes=4 * HUGE, length=4 * HUGE, checked=0
    )


BIG = 1 << 31
LAST = (1 << 64) - 1
# Either what the index says, or columns of the manifest that no index could have.
LIES: dict[str, Callable[[CheckpointIndex], CheckpointIndex] | dict[str, Any]] = {
    "huge shape": tensor(tensor_shape=[HUGE]),
    "huge shape and chunk": {"tensor.shape": [HUGE], "chunk.size.0": [HUGE]},
    "huge everything": huge_everything,
    "volume overflows": {
        "tensor.ndim": [3], "tensor.shape": [BIG] * 3, **{f"chunk.size.{dim}": [BIG] for dim in range(3)},
        **{f"chunk.offset.{dim}": [0] for dim in range(3)},
    },
    "huge and empty": tensor(tensor_ndim=[2], tensor_shape=[HUGE, 6], chunk_sizes=[HUGE, 0], chunk_offsets=[0, 0]),
    "many dimensions": {"tensor.ndim": [200], "tensor.shape": [1] * 200},
    "chunk beyond the tensor": {"chunk.offset.0": [3]},
    "chunk offset overflows": {"chunk.offset.0": [LAST]},
    "hole": tensor(tensor_shape=[7]),
    "no chunks": {"tensor.chunks": [0]},
    "huge number of chunks": {"tensor.chunks": [HUGE]},
    "overflowing number of chunks": {"tensor.chunks": [LAST]},
    "huge number of running checksums": {"tensor.running": [HUGE]},
    "other dtype": lambda index: replace(index, dtypes=("float64",)),
    "unknown dtype": lambda index: replace(index, dtypes=("no_such_dtype",)),
    "dtype that is code": lambda index: replace(index, dtypes=("__builtins__",)),
    "dtype not in the table": {"tensor.dtype": [9]},
    "beyond the end": item(offset=1),
    "far beyond the end": item(offset=1 << 61),
    "offset overflows": {"chunk.position": [LAST - 7]},
    "lead overflows": {"frame.lead": [LAST]},
    "length overflows": {"frame.trail": [LAST]},
    "too few bytes": item(framing=1, stored_bytes=8, length=8),
    "too many bytes": item(framing=1, stored_bytes=1 << 30, length=1 << 30),
    "unknown framing": item(framing=77),
    "archive that is none": item(framing=1),
    "object": {"chunk.framing": [2]},
    "frame not in the table": {"chunk.frame": [7]},
    "file not in the table": {"chunk.file": [5]},
    "transform that is not there": {"chunk.chain": [3]},
    "transform of a name": lambda index: with_chunk(replace(index, chains=(("os.system",),)), chain=1),
    "wrong checksum": item(crc32=0),
    "names that do not fit": {"tensor.name.bytes": [HUGE]},
    "name that is no text": {"tensor.name.text": np.array([0xFF], np.uint8)},
}  # fmt: skip
# Written by a later version, or so it seems: what this one cannot read may be sound.
MAY_BE_SOUND = {"unknown dtype", "dtype that is code", "transform of a name"}


@pytest.mark.parametrize("name", LIES)
def test_lies_of_our_index(folder: Path, name: str) -> None:
    """Every checksum of the index is right; what it says is not."""
    lie = LIES[name]
    if isinstance(lie, dict):
        edited_columns(folder, lie)
    else:
        edited_index(folder, lie)
    kinds = (CorruptCheckpointError, dcp.UnsupportedFormatError, dcp.LoadMismatchError)
    error = refused(folder, kinds, verified=name not in MAY_BE_SOUND)
    assert len(str(error)) < 4000


SIX = ((6,), [((0,), (6,))])
STOCK_LIES: dict[str, Any] = {
    "huge": (((HUGE,), [((0,), (HUGE,))]), {("t", (0,)): ("f", 0, len(BYTES))}),
    "huge length": (SIX, {("t", (0,)): ("f", 0, HUGE)}),
    "negative offset": (SIX, {("t", (0,)): ("f", -8, len(BYTES))}),
    "negative length": (SIX, {("t", (0,)): ("f", 0, -1)}),
    "beyond the end": (SIX, {("t", (0,)): ("f", 10, len(BYTES))}),
    "far beyond the end": (SIX, {("t", (0,)): ("f", 1 << 70, len(BYTES))}),
    "nowhere": (SIX, {}),
    "overlapping chunks": (
        ((6,), [((0,), (6,)), ((3,), (3,))]),
        {("t", (0,)): ("f", 0, len(BYTES)), ("t", (3,)): ("f", 0, len(BYTES))},
    ),
    "overlap and hole": (
        ((6,), [((0,), (3,)), ((1,), (3,))]),
        {("t", (0,)): ("f", 0, len(BYTES)), ("t", (1,)): ("f", 0, len(BYTES))},
    ),
    "hole": (((6,), [((0,), (5,))]), {("t", (0,)): ("f", 0, len(BYTES))}),
    "smaller than promised": (((7,), [((0,), (7,))]), {("t", (0,)): ("f", 0, len(BYTES))}),
    "no dimensions": (((), [((), ())]), {("t", ()): ("f", 0, len(BYTES))}),
    "other dimensions": (((6,), [((0, 0), (2, 3))]), {("t", (0, 0)): ("f", 0, len(BYTES))}),
}


@pytest.mark.parametrize("name", STOCK_LIES)
def test_lies_of_an_index_in_stocks_words(folder: Path, name: str) -> None:
    shape, places = STOCK_LIES[name]
    stock_index(folder, {"t": shape}, [], places)
    (folder / "f").write_bytes(BYTES)
    # Without torch nobody knows what an archive holds.
    verified = name not in {"smaller than promised", "no dimensions", "huge"}
    error = refused(folder, (CorruptCheckpointError, dcp.LoadMismatchError), verified=verified)
    assert "'t'" in str(error) or "f" in str(error)


def test_overlapping_chunks_of_ours(folder: Path) -> None:
    """Two boxes of one tensor that overlap: which one counts would be chance."""

    def edit(index: CheckpointIndex) -> CheckpointIndex:
        items = index.chunk_items
        assert items is not None
        columns = {
            name: np.repeat(getattr(items, name), 2)
            for name in ("file", "offset", "length", "lead", "stored_bytes", "framing", "chain", "checked", "crc32")
        }
        columns["stored_bytes"][1] = columns["length"][1] = 12
        return replace(
            index,
            tensor_chunks=np.array([2]),
            chunk_offsets=np.array([0, 3]),
            chunk_sizes=np.array([6, 3]),
            chunk_items=replace(items, **columns),
        )

    edited_index(folder, edit)
    assert "'t'" in str(refused(folder, (CorruptCheckpointError, dcp.LoadMismatchError)))


def test_archives_that_lie(tmp_path: Path) -> None:
    """Archives in stock's words: the pickle promises more than its records hold."""
    body = saved(torch.zeros(1 << 20))
    for tensor_bytes in (archive(b"\x80\x02N."), archive(b""), b"", b"PK\x03\x04", body[:-1], body[:200], body[200:]):
        folder = tmp_path / "checkpoint"
        stock_checkpoint(folder, tensor_bytes, saved(1))
        with little_memory(), pytest.raises(CorruptCheckpointError) as found:
            load(folder)
        assert (found.value.file, found.value.key, found.value.offset) == ("data.distcp", "t", 0)
    expanded = torch.zeros(1).expand(HUGE)
    stock_checkpoint(folder, saved(expanded), saved(1))
    with little_memory(), pytest.raises(REFUSALS):
        load(folder)
