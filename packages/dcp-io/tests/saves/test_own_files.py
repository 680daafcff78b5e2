"""Only files whose names and contents show that a save made them are removed from a folder."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_io import LocalStore, SaveInProgressError, remove_checkpoint
from dcp_io.checkpoints.remove_checkpoint import ReadingSign
from dcp_io.saves.cleanup import read_current
from dcp_io.saves.save_files import (
    MARK_BYTES,
    FoundMarker,
    Marker,
    data_mark,
    find_markers,
    is_own_file,
    marker_name,
    own_name,
    this_process,
)
from dcp_io.saves.save_session import SaveSession
from dcp_io.stores.store import Entry
from dcp_io.writing.write_engine import write_items
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import Framing, StoredItem

OLD, NEW = [{"a": b"1"}, {"b": b"2"}], [{"a": b"3"}, {"c": b"4"}]
GONE = dataclasses.replace(this_process(), host="elsewhere", pid=1)
# A user's files under names that no save gives, and under names that look as if one had.
FOREIGN = {
    "my-notes.txt": b"precious",
    "model.safetensors.index.json": b"{}",
    "a.tar.gz": b"\x1f\x8b",
    "notes.tmp": b"precious",
    ".latest-words.tmp": b"precious",
    "data.distcp": b"precious",
    "__0_0.distcp": b"precious",
    "__0_0.zzz.distcp": b"precious",
    "__9_9.zzz.distcp": data_mark("an\nother") + b"precious",
    "__8_8.zzz.distcp": data_mark("zzz")[:40] + b"precious" * 8,
    "..metadata.zzz.12345678.tmp": b"precious",
    ".dcp-reading-list.txt": b"precious",
    ".dcp-note.json.txt": b"{}",
}


def lay_out(store):
    for name, data in FOREIGN.items():
        store.publish(name, data)
    os.makedirs(os.path.join(store.path, "sub"), exist_ok=True)
    for name in ("sub/data.bin", "sub/__0_0.zzz.distcp"):
        store.publish(name, b"precious")


def lost(store):
    names = {name: store.read(name) for name in FOREIGN if store.exists(name)}
    below = [name for name in ("sub/data.bin", "sub/__0_0.zzz.distcp") if not store.exists(name)]
    return sorted({*FOREIGN} - {name for name, data in names.items() if data == FOREIGN[name]}) + below


def forge(store, save_id, replaced=(), rank=None, phase="ended"):
    marker = Marker(save_id, rank, GONE, phase, 1, tuple(replaced))
    store.publish(marker.name, marker.to_bytes())


EVERYTHING = [
    *FOREIGN,
    "sub/data.bin",
    "sub/__0_0.zzz.distcp",
    "../outside",
    "/etc/hostname",
    "sub/../my-notes.txt",
    "",
]


@pytest.mark.parametrize("rank", [None, 0])
def test_no_marker_makes_the_next_save_remove_what_is_not_a_saves(store, helpers, rank):
    current = helpers.save_all(store, OLD)
    lay_out(store)
    for save_id in ("safetensors", "tar", "txt", "zzz", "json", "metadata"):
        forge(store, save_id, EVERYTHING, rank)
    forge(store, current, EVERYTHING, rank)
    outside = os.path.join(os.path.dirname(store.path), "outside")
    with open(outside, "wb") as file:
        file.write(b"precious")
    helpers.save_all(store, NEW)
    assert lost(store) == []
    assert os.path.exists(outside)
    assert helpers.load_all(store) == helpers.merged(NEW)
    assert find_markers(store, store.list()) == []


@pytest.mark.parametrize("rank", [None, 0])
def test_no_marker_makes_a_save_remove_the_index_of_the_checkpoint(store, helpers, rank):
    for local in (None, "id"):
        current = helpers.save_all(store, OLD, rank_local_id=local)
        forge(store, current, helpers.names(store), rank)
        SaveSession.begin(store).abort()
        assert helpers.load_all(store) == helpers.merged(OLD)
        remove_checkpoint(store)


def test_an_index_that_names_a_users_files_removes_none(store, helpers):
    helpers.save_all(store, OLD)
    info = read_current(store).index.info
    names = [*FOREIGN, "sub/data.bin", "sub/__0_0.zzz.distcp"]
    for end in (lambda: helpers.save_all(store, NEW), lambda: remove_checkpoint(store)):
        lay_out(store)
        values = {f"v{n}": ("uint8", (8,), StoredItem(name, 0, 8, 0, 8, Framing.RAW)) for n, name in enumerate(names)}
        store.publish(".metadata", encode(helpers.make_index(values, info=info)))
        end()
        assert lost(store) == []


@pytest.mark.parametrize("layout", ["torch", "raw"])
@pytest.mark.parametrize("tear", ["whole", "half", "head", "empty", "zeros", "first page lost", "first sector lost"])
def test_what_a_crash_leaves_is_recognised(store, helpers, layout, tear):
    requests = [helpers.raw_request("k", b"\xff" * 10_000), helpers.raw_request("s", b"\x01")]
    (name,) = {item.file for item in write_items(store, requests, prefix="__3_", save_id="dead", layout=layout)}
    data = store.read(name)
    torn = {
        "whole": data,
        "half": data[: len(data) // 2],
        "head": data[:10],
        "empty": b"",
        "zeros": bytes(len(data)),
        "first page lost": bytes(4096) + data[4096:],
        "first sector lost": bytes(512) + data[512:],
    }[tear]
    store.publish(name, torn)
    assert is_own_file(store, name, len(torn))
    forge(store, "dead", phase="saving")
    os.utime(os.path.join(store.path, marker_name("dead", None)), (1, 1))
    SaveSession.begin(store).abort()
    assert store.list() == []


def test_a_link_keeps_the_mark_of_the_save_that_wrote_the_bytes(store):
    store.publish("__0_0.dead.distcp", data_mark("another") + b"bytes")
    assert is_own_file(store, "__0_0.dead.distcp", 69)
    forge(store, "dead", phase="saving")
    os.utime(os.path.join(store.path, marker_name("dead", None)), (1, 1))
    SaveSession.begin(store).abort()
    assert store.list() == []


@given(st.binary(min_size=1, max_size=200).filter(any))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_other_bytes_are_nobodys(tmp_path, data):
    store = LocalStore(tmp_path / "folder")
    store.make()
    name = "__0_0.dead.distcp"
    store.publish(name, data, sync=False)
    known = data.startswith(data_mark("dead")[: len(data)]) or data[:64].lstrip(b"\0")[:4] in (
        b"PK\x03\x04",
        b"\x28\xb5\x2f\xfd",
    )
    assert is_own_file(store, name, len(data)) is known


def test_links_and_pipes_are_nobodys(store):
    outside = os.path.join(os.path.dirname(store.path), "mine")
    with open(outside, "wb") as file:
        file.write(data_mark("dead"))
    os.symlink(outside, os.path.join(store.path, "__0_0.dead.distcp"))
    os.mkfifo(os.path.join(store.path, "__0_1.dead.distcp"))
    os.symlink(outside, os.path.join(store.path, marker_name("odd", None)))
    forge(store, "dead")
    with pytest.raises(SaveInProgressError):  # a marker that is a link says nothing but its name
        SaveSession.begin(store)
    os.unlink(os.path.join(store.path, marker_name("odd", None)))
    SaveSession.begin(store).abort()
    assert sorted(entry.name for entry in store.list()) == ["__0_0.dead.distcp", "__0_1.dead.distcp"]
    assert os.path.exists(outside)


@pytest.mark.parametrize("away", [-4000.0, 4000.0, 4e9])
def test_times_far_from_now_block_nobody(store, away):
    forge(store, "elsewhere", phase="saving")
    store.publish(".dcp-reading-0123456789ab", json.dumps(GONE.to_dict()).encode())
    for name in (marker_name("elsewhere", None), ".dcp-reading-0123456789ab"):
        path = os.path.join(store.path, name)
        os.utime(path, (os.stat(path).st_mtime + away,) * 2)
    assert ReadingSign.alive(store, stale_after_seconds=3600) == []
    SaveSession.begin(store).abort()
    assert find_markers(store, store.list()) == []


@pytest.mark.parametrize("away", [-3000.0, 3000.0])
def test_a_clock_that_is_a_little_off_kills_nobody(away):
    marker = Marker("abc", None, GONE, "saving")
    found = FoundMarker(marker, Entry(marker.name, 1, 1e6 + away))
    assert not found.is_dead(now=1e6, stale_after_seconds=3600)


HUGE = ["[" * 200_000, '{"process": ' * 50_000, "1" * 10_000]


@pytest.mark.parametrize(
    "change", [{"started_ns": 1e300}, {"started_ns": -5}, {"phase": []}, {"phase": {}}, {"replaced": {"a": 1}}]
)
def test_what_a_marker_says_is_never_trusted_to_make_sense(change):
    said = {**json.loads(Marker("abc", None, GONE, "saving", 5).to_bytes()), **change}
    text = json.dumps(said).replace("1e+300", "1e999")
    marker = Marker.from_bytes(".dcp-save-abc", text.encode())
    assert "save abc" in FoundMarker(marker, Entry(marker.name, 1, 0.0)).describe(0.0)


@pytest.mark.parametrize("text", HUGE, ids=["deep lists", "deep objects", "long number"])
def test_markers_that_are_hard_to_read_say_nothing(store, text):
    store.publish(marker_name("odd", None), text.encode())
    (found,) = find_markers(store, store.list())
    assert found.marker.process is None


def test_a_marker_larger_than_any_is_not_read(store, monkeypatch):
    with open(os.path.join(store.path, marker_name("odd", None)), "wb") as file:
        file.truncate(1 << 40)
    (found,) = find_markers(store, store.list())
    assert found.marker.process is None


def test_each_mark_has_one_length():
    assert {len(data_mark("x" * n)) for n in (1, 16, 56, 64)} == {MARK_BYTES}


@pytest.mark.parametrize(
    "name", ["a.distcp", "__0_0.a.b.distcp.txt", "x.metadata", "__0.a/b.metadata", ".dcp-save-a.b"]
)
def test_names_that_saves_do_not_give(name):
    assert own_name(name) is None
