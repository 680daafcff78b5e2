"""Stock's file-system interface, and which ids mean a local folder."""

from pathlib import Path

import pytest

from dcp_fs import FileSystem, FileSystemBase
from dcp_fs.filesystem import is_local_id


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


@pytest.mark.parametrize(
    ("checkpoint_id", "local"),
    [
        (Path("anywhere"), True),
        ("relative/folder", True),
        ("file:///tmp/x", True),
        ("local:///tmp/x", True),
        ("FILE:///tmp/x", True),
        ("s3://bucket/key", False),
        ("memory://x", False),
        ("https://host/x", False),
    ],
)
def test_local_ids(checkpoint_id: str | Path, local: bool) -> None:
    assert is_local_id(checkpoint_id) == local
