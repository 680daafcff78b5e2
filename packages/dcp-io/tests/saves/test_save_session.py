from __future__ import annotations

import dataclasses
import json
import os
import threading
import time

import pytest

from dcp_io import CheckpointExistsError, LocalStore, SaveInProgressError
from dcp_io.saves import save_files as markers
from dcp_io.saves import save_session as saves
from dcp_io.saves.save_files import Marker, data_mark, find_markers, this_process
from dcp_io.saves.save_session import SaveSession
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import Framing, ManifestInfo, StoredItem

OLD, NEW = [{"a": b"1"}, {"b": b"2"}], [{"a": b"3"}, {"c": b"4"}]


@pytest.fixture
def plant(store):
    """Write a marker as another process would have left it."""

    def plant(save_id, *, host=None, gone=False, phase="saving", rank=None, replaced=(), age=0.0):
        process = this_process()
        if host is not None:
            process = dataclasses.replace(process, host=host)
        if gone:
            process = dataclasses.replace(process, start_ticks=1)
        marker = Marker(save_id, rank, process, phase, 0, tuple(replaced))
        store.publish(marker.name, marker.to_bytes())
        if age:
            then = time.time() - age
            os.utime(os.path.join(store.path, marker.name), (then, then))
        return marker.name

    return plant


def test_a_save_leaves_its_files_and_nothing_else(store, helpers):
    helpers.save_all(store, OLD)
    save_id = helpers.save_all(store, NEW)
    assert helpers.names(store) == [".metadata", f"__0_0.{save_id}.distcp", f"__1_0.{save_id}.distcp"]
    assert helpers.load_all(store) == helpers.merged(NEW)


def test_the_folder_is_made(tmp_path):
    store = LocalStore(tmp_path / "a" / "b")
    session = SaveSession.begin(store)
    assert [entry.name for entry in store.list()] == [f".dcp-save-{session.save_id}"]
    session.abort()
    assert store.list() == []


def test_generations_grow(store, helpers):
    assert SaveSession(store, "x", stale_after_seconds=1).generation == 1
    for expected in (1, 2, 3):
        session = SaveSession.begin(store)
        assert session.generation == expected
        info = ManifestInfo(session.save_id, 1, "test", generation=session.generation)
        session.publish(".metadata", encode(helpers.make_index({}, info=info)))
        session.finish(())


def test_a_second_live_save_is_refused_and_leaves_the_first_alone(store, helpers):
    first = SaveSession.begin(store)
    with pytest.raises(SaveInProgressError, match=rf"process {os.getpid()} on .*remove .dcp-save-{first.save_id}"):
        SaveSession.begin(store)
    assert [found.marker.save_id for found in find_markers(store, store.list())] == [first.save_id]
    first.abort()
    SaveSession.begin(store).abort()
    assert store.list() == []


def test_of_many_that_start_at_once_one_wins(store):
    for _ in range(5):
        won, lost = [], []
        barrier = threading.Barrier(6)

        def begin(won=won, lost=lost, barrier=barrier):
            barrier.wait()
            try:
                won.append(SaveSession.begin(store, sync=False))
            except SaveInProgressError as error:
                lost.append(error)

        threads = [threading.Thread(target=begin) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 5)
        assert [found.marker.save_id for found in find_markers(store, store.list())] == [won[0].save_id]
        won[0].abort()


def test_a_later_starter_is_waited_for(store, plant):
    """The other save's marker shows that it started later: it will find this save's marker, and end."""
    name = plant("zzz", phase="starting", host="elsewhere", age=-30.0)
    gone = threading.Event()

    def end():
        gone.set()
        store.delete(name)

    threading.Timer(0.3, end).start()
    session = SaveSession.begin(store)
    assert gone.is_set()
    session.abort()


def test_an_earlier_starter_wins(store, plant, monkeypatch):
    monkeypatch.setattr(saves.time, "sleep", lambda seconds: pytest.fail("waited for a save that never gives way"))
    plant("aaa", phase="starting", host="elsewhere", age=5.0)
    with pytest.raises(SaveInProgressError, match="elsewhere"):
        SaveSession.begin(store)


@pytest.mark.parametrize(
    "marker",
    [{"host": "elsewhere"}, {"host": "elsewhere", "age": 3000.0}, {"rank": 3, "host": "elsewhere"}],
)
def test_a_save_that_may_be_alive_elsewhere_is_respected(store, plant, monkeypatch, marker):
    monkeypatch.setattr(saves.time, "sleep", lambda seconds: pytest.fail("waited for a save that never gives way"))
    name = plant("other", **marker)
    store.publish("__0_0.other.distcp", b"")
    with pytest.raises(SaveInProgressError, match="stale_after_seconds=3600"):
        SaveSession.begin(store)
    assert store.exists(name)
    assert store.exists("__0_0.other.distcp")


@pytest.mark.parametrize(
    "marker",
    [{"gone": True}, {"host": "elsewhere", "age": 4000.0}, {"host": "elsewhere", "phase": "ended"}, {}],
    ids=["process gone", "silent for long", "ended", "forgotten by this process"],
)
def test_dead_saves_are_cleaned_up(store, helpers, plant, marker):
    helpers.save_all(store, OLD)
    before = helpers.names(store)
    plant("dead", replaced=before, **marker)
    debris = {
        "__0_0.dead.distcp": b"",
        "__7_3.dead.distcp": data_mark("dead") + b"x",
        "..metadata.dead.12345678.tmp": b"\x80",
    }
    for name, data in debris.items():
        store.publish(name, data)
    info = ManifestInfo("dead", 2, "test", generation=9, rank=0)
    store.publish("__0.dead.metadata", encode(helpers.make_index({}, info=info)))
    store.publish("__0_0.deadly.distcp", b"of nobody that we know")
    SaveSession.begin(store).abort()
    assert helpers.names(store) == sorted([*before, "__0_0.deadly.distcp"])
    assert helpers.load_all(store) == helpers.merged(OLD)


def test_files_of_a_dead_save_that_the_current_index_names_are_kept(store, helpers, plant):
    store.publish("__0_0.dead.distcp", b"x")
    store.publish("__0_1.dead.distcp", data_mark("dead"))
    item = StoredItem("__0_0.dead.distcp", 0, 1, 0, 1, Framing.RAW)
    index = helpers.make_index({"a": ("uint8", (1,), item)}, info=ManifestInfo("other", 1, "test"))
    store.publish(".metadata", encode(index))
    plant("dead", gone=True)
    SaveSession.begin(store).abort()
    assert helpers.names(store) == [".metadata", "__0_0.dead.distcp"]


def test_a_damaged_marker_is_believed_until_it_is_old(store, monkeypatch):
    monkeypatch.setattr(markers, "_TORN_SECONDS", 600.0)
    store.publish(".dcp-save-odd", b"")
    with pytest.raises(SaveInProgressError, match="unknown process"):
        SaveSession.begin(store)
    os.utime(os.path.join(store.path, ".dcp-save-odd"), (1, 1))
    SaveSession.begin(store).abort()
    assert store.list() == []


@pytest.mark.parametrize("data", [b"", bytes(300), b'{"save_id": "odd", "proc'])
def test_a_marker_that_lost_its_bytes_with_the_power_does_not_block(store, data):
    store.publish(".dcp-save-odd", data)
    store.publish("__0_0.odd.distcp", data_mark("odd"))
    minute_ago = time.time() - 60
    os.utime(os.path.join(store.path, ".dcp-save-odd"), (minute_ago, minute_ago))
    SaveSession.begin(store).abort()
    assert store.list() == []


def test_what_has_the_name_of_a_marker_and_is_none_stays_and_does_not_block(store):
    store.publish(".dcp-save-odd", b"\xff")
    os.utime(os.path.join(store.path, ".dcp-save-odd"), (1, 1))
    SaveSession.begin(store).abort()
    assert store.exists(".dcp-save-odd")


def test_a_marker_of_a_later_version_is_believed(store):
    store.publish(".dcp-save-odd", b'{"version": 2}')
    minute_ago = time.time() - 60
    os.utime(os.path.join(store.path, ".dcp-save-odd"), (minute_ago, minute_ago))
    with pytest.raises(SaveInProgressError, match="unknown process"):
        SaveSession.begin(store)


def test_what_a_killed_finish_left_is_removed(store, helpers, plant):
    helpers.save_all(store, OLD)
    old = helpers.names(store)
    store.publish("keep", b"not ours")
    save_id = helpers.save_all(store, NEW)
    for name in old:
        if name != ".metadata":
            store.publish(name, data_mark(name.split(".")[1]) + b"left over")
    marker = plant(save_id, gone=True, replaced=[*old, f"__0_0.{save_id}.distcp", ".metadata"])
    SaveSession.begin(store).abort()
    assert not store.exists(marker)
    assert helpers.names(store) == sorted([".metadata", f"__0_0.{save_id}.distcp", f"__1_0.{save_id}.distcp", "keep"])
    assert helpers.load_all(store) == helpers.merged(NEW)


def test_a_save_elsewhere_that_has_published_blocks_nobody(store, helpers, plant):
    save_id = helpers.save_all(store, OLD)
    plant(save_id, host="elsewhere")
    helpers.save_all(store, NEW)
    assert helpers.load_all(store) == helpers.merged(NEW)


def test_files_that_the_new_index_takes_over_are_kept(store, helpers):
    helpers.save_all(store, OLD)
    old = [name for name in helpers.names(store) if name != ".metadata"]
    session = SaveSession.begin(store)
    info = ManifestInfo(session.save_id, 2, "test", generation=session.generation)
    session.publish(".metadata", encode(helpers.make_index({}, info=info)))
    session.finish(old[:1])
    assert helpers.names(store) == [".metadata", old[0]]


@pytest.mark.parametrize("damaged", [".metadata", "__0.metadata", "__0.one.metadata"])
@pytest.mark.parametrize("rank_local_id", [None, "two"])
def test_a_save_over_damage_is_newer_than_all_that_is_there(store, helpers, damaged, rank_local_id):
    for _ in range(3):
        helpers.save_all(store, OLD)
    index = store.read(".metadata")
    helpers.save_all(store, [{"x": b"9"}], rank_local_id="one")
    store.publish(".metadata", index)
    store.publish(damaged, b"damaged")
    helpers.save_all(store, [{"a": b"5"}], rank_local_id=rank_local_id)
    assert helpers.load_all(store) == {"a": b"5"}
    helpers.save_all(store, NEW)
    assert helpers.load_all(store) == helpers.merged(NEW)


def test_overwrite_false_refuses_any_checkpoint(store, helpers):
    SaveSession.begin(store, overwrite=False).abort()
    helpers.save_all(store, OLD)
    before = helpers.names(store)
    with pytest.raises(CheckpointExistsError, match=r"Checkpoint already exists in .*overwrite=False"):  # stock's words
        SaveSession.begin(store, overwrite=False)
    store.publish(".metadata", b"damaged")
    with pytest.raises(CheckpointExistsError):
        SaveSession.begin(store, overwrite=False)
    assert helpers.names(store) == before


def test_overwrite_false_does_not_mind_a_dead_save(store, plant):
    plant("dead", gone=True)
    store.publish("__0_0.dead.distcp", data_mark("dead"))
    SaveSession.begin(store, overwrite=False).abort()
    assert store.list() == []


def test_a_damaged_checkpoint_can_be_replaced_but_nothing_is_guessed_about_it(store, helpers, plant):
    helpers.save_all(store, OLD)
    files = [name for name in helpers.names(store) if name != ".metadata"]
    store.publish(".metadata", b"damaged")
    plant("dead", gone=True)
    store.publish("__0_0.dead.distcp", data_mark("dead") + b"may belong to the damaged checkpoint")
    helpers.save_all(store, NEW)
    assert helpers.load_all(store) == helpers.merged(NEW)
    assert {*files, "__0_0.dead.distcp"} < set(helpers.names(store))
    helpers.save_all(store, NEW)
    assert "__0_0.dead.distcp" not in helpers.names(store)


def test_a_hostile_index_cannot_make_cleanup_leave_the_folder(store, helpers, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"x")
    session = SaveSession.begin(store)
    marker = f".dcp-save-{session.save_id}"
    values = json.loads(store.read(marker))
    session.abort()
    values.update(replaced=["../victim", str(victim), ".metadata"], save_id="done")
    values["process"]["start_ticks"] = 1
    store.publish(".metadata", encode(helpers.make_index({}, info=ManifestInfo("done", 1, "test"))))
    store.publish(".dcp-save-done", json.dumps(values).encode())
    SaveSession.begin(store).abort()
    assert victim.exists()
    assert store.exists(".metadata")


def test_a_save_in_a_local_folder_reads_no_mount_table(store, helpers, monkeypatch):
    monkeypatch.setattr("dcp_io.stores.local_store.file_system_of", pytest.fail)
    helpers.save_all(store, [{"a": b"1"}])
    helpers.save_all(store, [{"a": b"2"}])
    assert helpers.load_all(store) == {"a": b"2"}
