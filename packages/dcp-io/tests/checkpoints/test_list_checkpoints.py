"""Checkpoints below a folder, and the saves that run in them."""

from __future__ import annotations

import os

import pytest

from dcp_io import LocalStore, StoreBackend, find_checkpoints
from dcp_io.checkpoints.list_checkpoints import running_saves
from dcp_io.saves.cleanup import read_current
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_manifest.folders.find_checkpoints import check_files

VALUES = [{"a": bytes(1000)}, {"b": bytes(500)}]


def test_checkpoints_are_found_at_any_depth(tmp_path, helpers):
    root = LocalStore(tmp_path)
    assert list(find_checkpoints(root.child("nowhere"))) == []
    for name in ("b", "a/deep", "a"):
        helpers.save_all(root.child(name), VALUES)
    root.child("empty").make()
    found = list(find_checkpoints(root))
    assert [each.store.url for each in found] == [root.child(name).url for name in ("a", "a/deep", "b")]
    assert all(each.modified_seconds > 1e9 for each in found)


def test_files_are_checked(store, helpers):
    helpers.save_all(store, VALUES)
    index = read_current(store).index
    check_files(store, index)
    name = index.files[0]
    path = os.path.join(store.path, name)
    os.truncate(path, os.path.getsize(path) - 1)
    with pytest.raises(CorruptCheckpointError, match=name):
        check_files(store, index)
    os.unlink(path)
    with pytest.raises(CheckpointNotFoundError, match=name):
        check_files(store, index)


def test_running_saves_are_told(store):
    assert running_saves(store, stale_after_seconds=60) == []
    backend = StoreBackend(store)
    save_id = backend.begin_save(overwrite=True)
    (told,) = running_saves(store, stale_after_seconds=60)
    assert save_id in told
    assert str(os.getpid()) in told
    backend.abort_save()
    assert running_saves(store, stale_after_seconds=60) == []
