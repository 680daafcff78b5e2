"""Faults of files that several processes write in ranges: full disks, removed files, links and pipes in their place."""

from __future__ import annotations

import errno
import os

import pytest

from dcp_io import LocalStore
from dcp_io.stores import local_store
from dcp_manifest.errors import CheckpointNotFoundError, UnsafeCheckpointError


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def test_a_full_disk_is_noticed_before_anything_is_written(store):
    with pytest.raises(OSError, match="x") as caught:
        store.create_sized("x", 1 << 60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert caught.value.filename == os.path.join(store.path, "x")
    assert store.list() == []


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_reserves_nothing(store, monkeypatch, code):
    def refuse(fd, mode, offset, size):
        import ctypes

        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(local_store, "_fallocate", lambda: refuse)
    store.create_sized("x", 5000).close(sync=True)
    assert store.read("x") == bytes(5000)


def test_a_system_without_the_call(store, monkeypatch):
    monkeypatch.setattr(local_store, "_fallocate", lambda: None)
    store.create_sized("x", 5000).close(sync=True)
    assert store.size("x") == 5000


def test_a_write_that_fails_names_the_file(store, fill_disk):
    sink = store.create_sized("x", 100)
    fill_disk()
    with pytest.raises(OSError, match="No space") as caught:
        sink.write_at(0, [b"1"])
    assert caught.value.filename == os.path.join(store.path, "x")
    sink.close(sync=False)


def test_a_removed_file_may_be_written_to(store):
    """Its rank is told of the failure of the save by another one."""
    sink = store.create_sized("x", 100)
    store.delete("x")
    sink.write_at(0, [b"1"])
    sink.close(sync=True)
    assert store.list() == []
    with pytest.raises(CheckpointNotFoundError, match="x"):
        store.open_sized("x")


def test_only_files_are_opened(store, tmp_path):
    (tmp_path / "outside").write_bytes(b"theirs")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe"):
        with pytest.raises(UnsafeCheckpointError, match=name):
            store.open_sized(name)
    with pytest.raises((UnsafeCheckpointError, IsADirectoryError)):
        store.open_sized("folder")
    assert (tmp_path / "outside").read_bytes() == b"theirs"
