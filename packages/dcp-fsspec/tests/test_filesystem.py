"""Stock's interface removes only files that it made."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from dcp_core import load, save
from dcp_core.errors import PluginNotFoundError
from dcp_fsspec import FileSystem, FsspecReader, FsspecWriter


@pytest.fixture
def file() -> Iterator[str]:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/streams/file", b"precious")
    yield "memory://streams/file"
    fs.store.pop("/streams/file", None)


def chosen(path: str) -> FileSystem:
    system = FileSystem()
    system.init_path(path)
    return system


def test_a_file_that_cannot_be_opened_stays(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system = chosen(file)
    with pytest.raises(FileExistsError), system.create_stream(file, "xb"):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("reset")

    with monkeypatch.context() as patch:
        patch.setattr(system.fs, "open", refuse)
        with pytest.raises(ConnectionError), system.create_stream(file, "wb"):
            pass
    assert system.fs.cat_file(file) == b"precious"


@pytest.mark.parametrize(("mode", "is_kept"), [("rb", True), ("ab", True), ("r+b", True), ("wb", False)])
def test_an_error_removes_only_a_file_that_the_stream_made(file: str, mode: str, is_kept: bool) -> None:
    system = chosen(file)
    with pytest.raises(KeyError), system.create_stream(file, mode):
        raise KeyError
    assert system.exists(file) == is_kept


def test_a_new_file_is_removed_if_the_block_raises(file: str) -> None:
    system = chosen(file)
    with pytest.raises(TypeError), system.create_stream(f"{file}2", "xb") as stream:
        stream.write("not bytes")  # type: ignore[arg-type]
    assert not system.exists(f"{file}2")


class Unheard(MemoryFileSystem):
    """A file system whose protocol only fsspec knows."""

    protocol = "unheard"


def test_any_protocol_that_fsspec_knows_by_id_alone() -> None:
    fsspec.register_implementation("unheard", Unheard, clobber=True)
    save({"w": torch.ones(2)}, checkpoint_id="unheard://box/made")
    found = {"w": torch.zeros(2)}
    load(found, checkpoint_id="unheard://box/made")
    assert found["w"].tolist() == [1, 1]
    with pytest.raises(PluginNotFoundError, match="unknown-to-all://"):
        save(found, checkpoint_id="unknown-to-all://box/made")


@pytest.mark.parametrize("inside", [False, True])
def test_another_file_system_gets_every_byte(inside: bool) -> None:
    opened: list[str] = []

    class Noting(FileSystem):
        def create_stream(self, path: object, mode: str):  # type: ignore[no-untyped-def, override]
            opened.append(mode)
            return super().create_stream(path, mode)  # type: ignore[arg-type]

    def changed(storage: FsspecWriter | FsspecReader) -> None:
        if inside:
            storage.fs.create_stream = Noting.create_stream.__get__(Noting())
            storage.fs.create_stream.__self__.init_path(storage.path)
        else:
            storage.fs = Noting()

    writer, reader = FsspecWriter("memory://noting/made"), FsspecReader("memory://noting/made")
    for storage in (writer, reader):
        changed(storage)
    save({"w": torch.ones(2)}, storage_writer=writer)
    assert "wb" in opened
    opened.clear()
    found = {"w": torch.zeros(2)}
    load(found, storage_reader=reader)
    assert set(opened) == {"rb"}
    assert found["w"].tolist() == [1, 1]
