from __future__ import annotations

import os
import shutil
import socket

import pytest

from dcp_manifest import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ManifestInfo,
    UnsafeCheckpointError,
    encode,
    find_checkpoints,
    index_of,
    latest_valid,
    needed_bytes,
)
from dcp_manifest.discover import check_files


@pytest.fixture
def save(make_index, tmp_path):
    """Makes a checkpoint of one tensor in a folder below the root."""

    def make(name, mtime, *, file_bytes=12):
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True)
        index = make_index(
            [("w", 0, 0, 0, (1,), [((0,), (1,))])],
            chunk_rows=[(0, 8, 0, 4, 0, 0, 0, 1)],
            dtypes=("float32",),
            files=("sub/a.distcp",),
            info=ManifestInfo(name, 1, "t"),
        )
        (folder / "sub" / "a.distcp").write_bytes(bytes(file_bytes))
        (folder / ".metadata").write_bytes(encode(index))
        os.utime(folder / ".metadata", (mtime, mtime))
        return folder

    return make


def test_newest_first_and_nested(save, tmp_path):
    save("run/step-1", 100)
    save("run/step-2", 300)
    save("run/step-2/extra", 200)
    (tmp_path / "run" / "logs").mkdir()
    found = find_checkpoints(tmp_path)
    assert [entry.path.relative_to(tmp_path).as_posix() for entry in found] == [
        "run/step-2",
        "run/step-2/extra",
        "run/step-1",
    ]
    assert [entry.modified_seconds for entry in found] == [300, 200, 100]
    assert find_checkpoints(tmp_path / "run" / "step-1")[0].path == tmp_path / "run" / "step-1"


def test_no_root_no_checkpoints(tmp_path):
    assert find_checkpoints(tmp_path / "nowhere") == []
    assert latest_valid(tmp_path / "nowhere") is None


def damage(folder, kind):
    if kind == "index":
        data = (folder / ".metadata").read_bytes()
        (folder / ".metadata").write_bytes(data[:-1])
    elif kind == "missing":
        (folder / "sub" / "a.distcp").unlink()
    elif kind == "short":
        (folder / "sub" / "a.distcp").write_bytes(bytes(11))
    elif kind == "foreign":
        (folder / ".metadata").write_bytes(b"something else")
    elif kind == "folder":
        (folder / ".metadata").unlink()
        (folder / ".metadata").mkdir()
    elif kind == "data is a folder":
        (folder / "sub" / "a.distcp").unlink()
        (folder / "sub" / "a.distcp").mkdir()
        os.utime(folder / ".metadata", (300, 300))


@pytest.mark.parametrize("kind", ["index", "missing", "short", "foreign", "folder"])
def test_the_latest_valid_passes_over_what_is_damaged(save, tmp_path, kind):
    save("old", 100)
    good = save("good", 200)
    newest = save("newest", 300)
    assert latest_valid(tmp_path).path == newest
    damage(newest, kind)
    assert latest_valid(tmp_path).path == good


def test_what_is_missing_is_named(save):
    folder = save("c", 1)
    index = index_of(folder)
    check_files(folder, index)
    damage(folder, "short")
    with pytest.raises(CorruptCheckpointError, match=r"has 11 bytes and the index needs 12.*a\.distcp"):
        check_files(folder, index)
    damage(folder, "missing")
    with pytest.raises(CheckpointNotFoundError, match=r"a\.distcp"):
        check_files(folder, index)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_refused(save, tmp_path, make):
    """A pipe is not waited for, and a device not read for ever."""
    for name in ("a.distcp", ".metadata"):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        folder = save("c", 1)
        place = folder / "sub" / name if name == "a.distcp" else folder / name
        place.unlink()
        make(place)
        with pytest.raises((CorruptCheckpointError, UnsafeCheckpointError), match=name.replace(".", r"\.")):
            check_files(folder, index_of(folder))
        assert latest_valid(tmp_path) is None


def test_a_socket_is_no_index(save, tmp_path, monkeypatch):
    folder = save("c", 1)
    monkeypatch.chdir(folder)
    (folder / ".metadata").unlink()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(".metadata")
    with pytest.raises(UnsafeCheckpointError, match=r"\.metadata is not a file"):
        index_of(folder)


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointNotFoundError, match=str(folder)):
            index_of(folder)
    (tmp_path / "__0.metadata").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError):
        index_of(tmp_path)


def test_files_are_needed_up_to_their_last_item(rich):
    big = 40 * 1024 * 1024
    assert needed_bytes(rich) == {
        "__0_0.0123456789abcdef.distcp": 9700,
        "sub/__1_0.0123456789abcdef.distcp": 5_000_000_000 + 340 + 4 * big + 240,
    }
