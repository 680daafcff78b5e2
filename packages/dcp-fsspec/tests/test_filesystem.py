"""Stock's interface removes only what it made."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest

from dcp_fsspec import FileSystem


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
