"""What may lie where a file should be, and files that change while they are read: clear errors, and nothing waits.

A test that waits for the other end of a pipe is ended by its time limit.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp
import dcp_format
from dcp_core.errors import CorruptCheckpointError, DcpError, UnsupportedFormatError
from dcp_io import LocalStore, latest_valid, verify_checkpoint
from dcp_io.stores.local_store import _LocalSource
from dcp_manifest import index_of, read_index
from dcp_manifest.file.blob import FOOTER_BYTES, Footer, read_footer
from integration_tests.robustness.crafted import METADATA, little_memory

TENSOR = torch.arange(60_000.0)


def save(folder: Path) -> Path:
    writer = dcp.FileSystemWriter(folder, layout="raw", thread_count=1)
    dcp.save({"t": TENSOR}, storage_writer=writer, no_dist=True)
    return folder


def load(folder: Path) -> torch.Tensor:
    template = {"t": torch.zeros(60_000)}
    dcp.load(template, storage_reader=dcp.FileSystemReader(folder, thread_count=1), no_dist=True)
    return template["t"]


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root can make devices")


def a_socket(path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # the absolute path is longer than addresses may be


def nothing_but_holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


NO_FILES = [a_pipe, a_folder, a_link_to_nothing, a_link_to_itself, a_link_to_a_device, a_device, a_socket]


def problems(folder: Path) -> None:
    report = verify_checkpoint(LocalStore(folder))
    if not report.ok:
        raise CorruptCheckpointError("; ".join(map(str, report.problems)))


READERS: dict[str, Callable[[Path], Any]] = {
    "load": load,
    "load_keys": lambda folder: dcp.load_keys(checkpoint_id=folder, no_dist=True),
    "index": index_of,
    "convert": lambda folder: dcp_format.convert(folder, folder.parent / "out.pt"),
    "verify": problems,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("thing", [*NO_FILES, nothing_but_holes], ids=lambda thing: thing.__name__)
def test_in_the_place_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thing: Callable[[Path], None], reader: str
) -> None:
    folder = save(tmp_path / "root" / "checkpoint")
    monkeypatch.chdir(folder)
    (folder / METADATA).unlink()
    thing(folder / METADATA)
    with little_memory(), pytest.raises(DcpError) as found:
        READERS[reader](folder)
    assert str(folder) in str(found.value) or METADATA in str(found.value)
    with little_memory():
        assert latest_valid(folder.parent) is None


@pytest.mark.parametrize("reader", [name for name in READERS if name != "index"])
@pytest.mark.parametrize("thing", NO_FILES, ids=lambda thing: thing.__name__)
def test_in_the_place_of_a_data_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thing: Callable[[Path], None], reader: str
) -> None:
    folder = save(tmp_path / "root" / "checkpoint")
    monkeypatch.chdir(folder)
    (path,) = folder.glob("*.distcp")
    path.unlink()
    thing(path)
    with pytest.raises(DcpError) as found:
        READERS[reader](folder)
    assert path.name in str(found.value)
    assert latest_valid(folder.parent) is None


@pytest.mark.parametrize("thing", NO_FILES, ids=lambda thing: thing.__name__)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "state.pt"])
def test_in_the_place_of_other_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thing: Callable[[Path], None], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    thing(tmp_path / name)
    with pytest.raises((DcpError, FileNotFoundError)):
        dcp_format.convert(tmp_path / name if name == "state.pt" else tmp_path, tmp_path / "out")


@pytest.mark.parametrize("verify", ["blocks", "full", "before"])
def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: Any) -> None:
    folder = save(tmp_path / "checkpoint")
    (path,) = folder.glob("*.distcp")
    real = _LocalSource.read_into

    def read_into(self: _LocalSource, offset: int, buffers: Any) -> None:
        if self._name == path.name:
            os.truncate(path, 100_000)
        real(self, offset, buffers)

    monkeypatch.setattr(_LocalSource, "read_into", read_into)
    template = {"t": torch.zeros(60_000)}
    reader = dcp.FileSystemReader(folder, thread_count=1, verify=verify)
    with pytest.raises(CorruptCheckpointError, match="truncated") as found:
        dcp.load(template, storage_reader=reader, no_dist=True)
    assert path.name in str(found.value)


def test_an_index_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "checkpoint")
    real = _LocalSource.size

    def size(self: _LocalSource) -> int:
        found = real(self)
        os.truncate(folder / self._name, found // 2)
        return found

    monkeypatch.setattr(_LocalSource, "size", size)
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        load(folder)


def newer(data: bytes, major: int) -> bytes:
    footer = read_footer(data[-FOOTER_BYTES:], size=len(data), file=METADATA)
    assert footer is not None
    fields = {name: getattr(footer, name) for name in Footer.__slots__}
    return data[:-FOOTER_BYTES] + Footer(**{**fields, "major": major}).to_bytes()


@pytest.mark.parametrize("reader", READERS)
def test_a_newer_version_wrote_it(tmp_path: Path, reader: str) -> None:
    folder = save(tmp_path / "root" / "checkpoint")
    path = folder / METADATA
    path.write_bytes(newer(path.read_bytes(), 4))
    with pytest.raises(DcpError, match=r"format 4\.0.*install a newer"):
        READERS[reader](folder)
    with pytest.raises(UnsupportedFormatError):
        read_index(path.read_bytes(), file=METADATA)
    assert latest_valid(folder.parent) is None


@pytest.mark.parametrize("where", ["checkpoint", "checkpoint/sub"])
def test_a_file_in_the_place_of_the_folder(tmp_path: Path, where: str) -> None:
    (tmp_path / "checkpoint").write_bytes(b"a file")
    with pytest.raises((DcpError, NotADirectoryError)) as found:
        load(tmp_path / where)
    assert "checkpoint" in str(found.value)
    with pytest.raises((DcpError, NotADirectoryError)) as found:
        save(tmp_path / where)
    assert "checkpoint" in str(found.value)
