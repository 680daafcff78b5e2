"""Stock's file-system interface."""

from pathlib import Path

import pytest

from dcp_fs import FileSystem, FileSystemBase


def test_operations(tmp_path: Path) -> None:
    fs = FileSystem()
    folder = fs.concat_path(fs.init_path(str(tmp_path)), "a/b")
    fs.mkdir(folder)
    first, second = fs.concat_path(folder, "1"), fs.concat_path(folder, "2")
    with fs.create_stream(first, "wb") as stream:
        stream.write(b"x")  # type: ignore[attr-defined]
    fs.rename(first, second)
    assert not fs.exists(first)
    assert fs.ls(folder) == [str(second)]
    fs.rm_file(second)
    assert fs.ls(folder) == []
    assert fs.validate_checkpoint_id(tmp_path)


def test_is_an_interface() -> None:
    with pytest.raises(TypeError, match="abstract"):
        FileSystemBase()  # type: ignore[abstract]
