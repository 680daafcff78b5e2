"""Ends of a save: abort and finish, and the marker until then (its loss, its renewal)."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time

import pytest

from dcp_io import LocalStore, SaveInProgressError
from dcp_io.saves.save_files import data_mark, find_markers
from dcp_io.saves.save_session import SaveSession
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import ManifestInfo

OLD, NEW = [{"a": b"1"}, {"b": b"2"}], [{"a": b"3"}, {"c": b"4"}]


def test_abort_removes_all_of_the_save_and_nothing_else(store, helpers):
    helpers.save_all(store, OLD)
    before = helpers.names(store)
    session = SaveSession.begin(store)
    for rank in (0, 5):
        store.publish(f"__{rank}_0.{session.save_id}.distcp", data_mark(session.save_id))
    session.abort()
    session.abort()
    assert helpers.names(store) == before
    assert helpers.load_all(store) == helpers.merged(OLD)


class Watched(LocalStore):
    """Notes the order of deletions. Eight data files are deleted only together."""

    def __init__(self, path):
        super().__init__(path)
        self.deleted, self.together, self.failing = [], threading.Barrier(8), ""

    def delete(self, name):
        if name == self.failing:
            raise OSError(errno.EACCES, f"{name} stays")
        if name.endswith(".distcp"):
            self.together.wait(timeout=300)
        self.deleted.append(name)
        super().delete(name)


def many_files(store):
    session = SaveSession.begin(store)
    for rank in range(64):
        store.publish(f"__{rank}_0.{session.save_id}.distcp", data_mark(session.save_id))
    rank_index = f"__0.{session.save_id}.metadata"
    store.publish(rank_index, b"")
    return session, rank_index


def test_data_files_of_many_ranks_are_deleted_in_parallel_between_index_and_marker(tmp_path):
    store = Watched(tmp_path / "checkpoint")
    session, rank_index = many_files(store)
    session.abort()
    assert store.list() == []
    assert (store.deleted[0], store.deleted[-1]) == (rank_index, f".dcp-save-{session.save_id}")
    assert len(store.deleted) == 66


def test_a_file_that_cannot_be_deleted_is_logged_and_all_others_are_deleted(tmp_path, caplog):
    store = Watched(tmp_path / "checkpoint")
    session, _ = many_files(store)
    store.together = threading.Barrier(1)
    store.failing = f"__9_0.{session.save_id}.distcp"
    session.abort()
    assert {entry.name for entry in store.list()} == {f".dcp-save-{session.save_id}", store.failing}
    assert caplog.text.count("could not remove") == caplog.text.count(f"{store.failing} stays") == 1


@pytest.mark.parametrize("allowed", [0, 3])
def test_files_are_deleted_when_the_system_allows_no_more_threads(tmp_path, monkeypatch, caplog, allowed):
    store = LocalStore(tmp_path / "checkpoint")
    session, _ = many_files(store)
    foreign = f"__0_1.{session.save_id}.distcp"
    store.publish(foreign, b"no file of a save")
    real, started = threading.Thread.start, []

    def start(thread):
        if len(started) == allowed:
            for each in started:
                each.join()
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    session.abort()
    assert [entry.name for entry in store.list()] == [foreign]
    assert caplog.text.count(f"{foreign!r} in") == 1


def test_abort_after_publishing_keeps_the_checkpoint(store, helpers):
    session = SaveSession.begin(store)
    store.publish(f"__0_0.{session.save_id}.distcp", b"x")
    info = ManifestInfo(session.save_id, 1, "test")
    session.publish(".metadata", encode(helpers.make_index({}, info=info)))
    session.abort()
    assert store.exists(f"__0_0.{session.save_id}.distcp")
    (found,) = find_markers(store, store.list())
    assert found.marker.phase == "ended"
    SaveSession.begin(store).abort()
    assert find_markers(store, store.list()) == []


def test_abort_when_publishing_failed_halfway(store, helpers, patch_os):
    """The error came after the replacement, so the published files must not be removed."""
    session = SaveSession.begin(store)
    name = f"__0_0.{session.save_id}.distcp"
    store.publish(name, b"x")
    folder_syncs = []

    def fsync(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            folder_syncs.append(fd)
            raise OSError(errno.EIO, "broken")
        os.fsync(fd)

    patch_os(fsync=fsync)
    with pytest.raises(OSError, match="Input/output"):
        session.publish(".metadata", encode(helpers.make_index({}, info=ManifestInfo(session.save_id, 1, "test"))))
    assert folder_syncs
    session.abort()
    assert store.exists(name)


def test_a_save_that_lost_its_marker_does_not_publish(store, helpers):
    session = SaveSession.begin(store)
    store.delete(f".dcp-save-{session.save_id}")
    with pytest.raises(SaveInProgressError, match="another save considered it dead"):
        session.publish(".metadata", b"x")
    assert not store.exists(".metadata")
    session.abort()
    assert store.list() == []


def test_markers_are_renewed_and_never_come_back(store):
    session = SaveSession.begin(store, stale_after_seconds=0.5)
    path = os.path.join(store.path, f".dcp-save-{session.save_id}")
    os.utime(path, (1, 1))
    deadline = time.monotonic() + 100
    while os.stat(path).st_mtime == 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    renewing = session._renewal
    session.abort()
    assert not renewing.is_alive()
    assert store.list() == []


def test_a_renewal_that_misses_the_marker_is_noticed(store):
    session = SaveSession.begin(store, stale_after_seconds=0.5)
    store.delete(f".dcp-save-{session.save_id}")
    deadline = time.monotonic() + 100
    while not session._renewal.lost:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    session.abort()


def test_a_session_that_is_dropped_without_an_end_blocks_nobody(store, helpers):
    session = SaveSession.begin(store, stale_after_seconds=0.5)
    name = f"__0_0.{session.save_id}.distcp"
    store.publish(name, data_mark(session.save_id))
    del session
    gc.collect()
    helpers.save_all(store, NEW)
    assert helpers.load_all(store) == helpers.merged(NEW)
    assert not store.exists(name)


def test_finish_does_not_raise_and_the_next_save_makes_up_for_it(store, helpers, patch_os, caplog):
    helpers.save_all(store, OLD)
    old = [name for name in helpers.names(store) if name != ".metadata"]

    def unlink(path):
        raise OSError(errno.EACCES, "Permission denied")

    patch_os(unlink=unlink)
    helpers.save_all(store, NEW)
    assert "could not remove" in caplog.text
    patch_os()
    assert helpers.load_all(store) == helpers.merged(NEW)
    assert set(old) < set(helpers.names(store))
    SaveSession.begin(store).abort()
    assert not set(old) & set(helpers.names(store))
    assert find_markers(store, store.list()) == []
