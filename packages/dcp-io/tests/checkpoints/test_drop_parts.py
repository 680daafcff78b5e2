"""Parts are removed from a checkpoint: what stays, what goes, and what is refused."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import numpy as np
import pytest

from dcp_io import (
    CheckpointReplacedError,
    LocalStore,
    ReadRequest,
    SaveInProgressError,
    StoreBackend,
    verify_checkpoint,
)
from dcp_io.checkpoints.drop_parts import SmallerCheckpoint, is_in
from dcp_io.checkpoints.remove_checkpoint import ReadingSign
from dcp_io.saves.save_session import SaveSession
from dcp_manifest import CheckpointNotFoundError, CorruptCheckpointError, index_of
from dcp_manifest.file.manifest_write import encode

VALUES = [
    {"app.model.a": b"1" * 100, "app.optimizer.a": b"2" * 70_000, "app.model.b": b"3" * 9_000_000, "step": b"4"},
    {"app.optimizer.b": b"5" * 10, "app.optimizer": b"6"},
]
MODEL = {key: data for key, data in VALUES[0].items() if key.startswith("app.model")}
REST = {"app.optimizer", "app.optimizer.a", "app.optimizer.b", "step"}
WAYS = [
    pytest.param(options, id="-".join(map(str, options)) or "plain")
    for options in ({}, {"single_file": False}, {"rank_local_id": "one"}, {"layout": "raw"})
]


@pytest.mark.parametrize(
    ("name", "parts", "inside"),
    [
        ("model", ["model"], True),
        ("model.a.b", ["other", "model.a"], True),
        ("model.ab", ["model.a"], False),
        ("model", ["model.a"], False),
        ("model", [], False),
    ],
)
def test_names_in_parts(name, parts, inside):
    assert is_in(name, parts) is inside


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", [{"keep": ["app.model"]}, {"drop": ["app.optimizer", "step"]}], ids=["keep", "drop"])
def test_what_stays_is_a_whole_checkpoint(store, helpers, way, rule):
    helpers.save_all(store, VALUES, **way)
    before = store_bytes(store)
    old = index_of(store).info
    smaller = SmallerCheckpoint(store, **rule)
    assert (smaller.parts, smaller.unknown, smaller.is_empty) == (["app.optimizer", "step"], [], False)
    smaller.publish(by="a test")
    assert helpers.load_all(store) == MODEL
    assert verify_checkpoint(store).problems == ()
    assert before - store_bytes(store) == smaller.bytes > 70_000
    index = index_of(store)
    assert {entry.name for entry in store.list()} == {".metadata", *index.files}
    assert index.info.generation == old.generation + 1
    assert (index.info.created_ns, index.info.world_size) == (old.created_ns, 2)
    assert index.info.origin == old.save_id != index.info.save_id
    assert index.info.why_missing("app.optimizer.a").startswith("a test, 20")
    assert index.info.why_missing("app.model.c") is None


def store_bytes(store):
    return sum(entry.bytes for entry in store.list() if entry.name.endswith(".distcp"))


@pytest.mark.parametrize("way", WAYS)
def test_values_without_bytes(store, helpers, way):
    values = [{"m.a": b"", "o.a": b"1" * 63, "m.b": b"2", "o.b": b""}, {"o.c": b"3", "m.c": b""}]
    helpers.save_all(store, values, **way)
    for keep in (["m"], ["m.a", "m.c"], ["m.c"]):
        smaller = SmallerCheckpoint(store, keep=keep)
        before = store_bytes(store)
        smaller.publish(by="a test")
        assert before - store_bytes(store) == smaller.bytes
        assert verify_checkpoint(store).problems == ()
        stay = {key: data for key, data in helpers.merged(values).items() if is_in(key, keep)}
        assert helpers.load_all(store) == stay


def test_a_name_that_begins_with_a_dot_is_a_part(store, helpers):
    helpers.save_all(store, [{"model.a": b"1", ".bytes": b"2" * 900, ".text": b"3"}])
    smaller = SmallerCheckpoint(store, keep=["model", ".text"])
    assert (smaller.parts, smaller.unknown) == ([".bytes"], [])
    smaller.publish(by="a test")
    assert index_of(store).info.why_missing(".bytes").startswith("a test")
    assert index_of(store).info.why_missing(".text") is None
    smaller = SmallerCheckpoint(store, keep=["model"])
    assert smaller.parts == [".text"]
    smaller.publish(by="a test")
    assert helpers.load_all(store) == {"model.a": b"1"}


def test_files_of_what_stays_are_left_alone(store, helpers):
    helpers.save_all(store, VALUES, single_file=False)
    before = {entry.name: entry for entry in store.list()}
    SmallerCheckpoint(store, keep=["app.model"]).publish(by="a test")
    files = [entry for entry in store.list() if entry.name != ".metadata"]
    assert len(files) == 2
    assert all(before[entry.name] == entry for entry in files)


def test_again(store, helpers):
    helpers.save_all(store, VALUES)
    SmallerCheckpoint(store, drop=["app.optimizer"]).publish(by="the first")
    one = store.read(".metadata")
    again = SmallerCheckpoint(store, drop=["app.optimizer"])
    assert (again.parts, again.bytes, again.unknown) == ([], 0, [])
    again.publish(by="the second")
    assert store.read(".metadata") == one
    SmallerCheckpoint(store, drop=["step"]).publish(by="the third")
    assert [why.partition(",")[0] for why in index_of(store).info.dropped.values()] == ["the first", "the third"]


def test_nothing_is_left_empty(store, helpers):
    helpers.save_all(store, VALUES)
    before = store.read(".metadata")
    smaller = SmallerCheckpoint(store, keep=["app.modle"])
    assert (smaller.is_empty, smaller.unknown) == (True, ["app.modle"])
    smaller.publish(by="a test")
    assert store.read(".metadata") == before


def test_there_is_nothing_to_make_smaller(store, helpers):
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
        SmallerCheckpoint(store, keep=["model"])
    store.publish(".metadata", b"broken")
    with pytest.raises(CorruptCheckpointError):
        SmallerCheckpoint(store, keep=["model"])


def test_a_tensor_stays_under_the_name_of_its_alias(store, helpers):
    helpers.save_all(store, [{"other.a": b"1" * 100, "model.b": b"2"}])
    index = index_of(store)
    names = {"model.a": 0, "model.c": 0, "model.d": 1, "other.e": 1}
    index = replace(index, alias_names=[*names], alias_targets=np.array([*names.values()], np.uint32))
    store.publish(".metadata", encode(index))
    SmallerCheckpoint(store, keep=["model"]).publish(by="a test")
    index = index_of(store)
    assert index.tensor_names == ["model.a", "model.b"]
    assert dict(zip(index.alias_names, index.alias_targets.tolist(), strict=True)) == {"model.c": 0, "model.d": 1}
    assert helpers.load_all(store) == {"model.a": b"1" * 100, "model.b": b"2"}


@pytest.mark.parametrize(("key", "refused"), [("app.model.b", True), ("app.optimizer.a", False)])
def test_damaged_values(store, helpers, key, refused):
    helpers.save_all(store, VALUES)
    index = index_of(store)
    item = index.stored_item(index.chunk_items, index.tensor_names.index(key))
    helpers.flip(store, item.file, item.offset + item.lead)
    before = sorted((entry.name, entry.bytes) for entry in store.list())
    smaller = SmallerCheckpoint(store, keep=["app.model"])
    if refused:
        with pytest.raises(CorruptCheckpointError, match="differ from what was saved"):
            smaller.publish(by="a test")
        assert sorted((entry.name, entry.bytes) for entry in store.list()) == before
    else:
        smaller.publish(by="a test")
        assert helpers.load_all(store) == MODEL


@pytest.mark.parametrize("is_short", [False, True])
def test_nothing_is_removed_if_a_file_that_stays_is_damaged(store, helpers, is_short):
    """Though nothing is copied: what was to be removed may be all that is left."""
    helpers.save_all(store, VALUES, single_file=False)
    index = index_of(store)
    file = index.stored_item(index.chunk_items, index.tensor_names.index("app.model.b")).file
    data = store.read(file)
    store.delete(file)
    if is_short:
        store.publish(file, data[:1000])
    before = helpers.names(store)
    with pytest.raises(CorruptCheckpointError if is_short else CheckpointNotFoundError, match=file):
        SmallerCheckpoint(store, keep=["app.model"]).publish(by="a test")
    assert helpers.names(store) == before
    assert index_of(store).info == index.info


def test_a_checkpoint_in_use_is_refused(store, helpers):
    helpers.save_all(store, VALUES)
    smaller = SmallerCheckpoint(store, keep=["app.model"])
    with ReadingSign(store, stale_after_seconds=60), pytest.raises(SaveInProgressError, match="is reading"):
        smaller.publish(by="a test")
    session = SaveSession.begin(store)
    with pytest.raises(SaveInProgressError, match="is being written"):
        smaller.publish(by="a test")
    session.abort()
    helpers.save_all(store, [{"app.model.z": b"1"}])
    with pytest.raises(SaveInProgressError, match="another save has replaced"):
        smaller.publish(by="a test")
    assert helpers.load_all(store) == {"app.model.z": b"1"}


@pytest.mark.parametrize("when", ["before", "while it copies"])
@pytest.mark.parametrize("who", ["is reading", "has left .dcp-note-next.json", "another save has replaced"])
def test_a_process_that_comes_later_is_respected(store, helpers, monkeypatch, who, when):
    """A reader, a save that is about to begin, and a save of PyTorch's, which writes no marker."""
    helpers.save_all(store, VALUES)
    smaller = SmallerCheckpoint(store, keep=["app.model"])
    index = store.read(".metadata")
    comes = contextlib.ExitStack()

    def come():
        if who == "is reading":
            comes.enter_context(ReadingSign(store, stale_after_seconds=60))
        elif who == "another save has replaced":
            file = index_of(store).files[0]
            store.publish(file, store.read(file))
        else:
            store.publish(".dcp-note-next.json", b"{}")

    if when == "before":
        come()
    else:
        sync_folder = LocalStore.sync_folder
        monkeypatch.setattr(LocalStore, "sync_folder", lambda self: (sync_folder(self), come()))
    with comes, pytest.raises(SaveInProgressError, match=who):
        smaller.publish(by="a test")
    assert store.read(".metadata") == index
    assert helpers.load_all(store) == helpers.merged(VALUES)
    assert {name for name in helpers.names(store) if not name.startswith(".dcp-note")} == {
        ".metadata",
        *index_of(store).files,
    }


def test_a_reader_without_a_lease_is_told_to_begin_again(store, helpers):
    helpers.save_all(store, VALUES)
    backend = StoreBackend(store)
    index = backend.read_index()
    item = index.stored_item(index.chunk_items, index.tensor_names.index("app.model.a"))
    SmallerCheckpoint(store, keep=["app.model"]).publish(by="a test")
    with pytest.raises(CheckpointReplacedError, match="load again"):
        backend.read([ReadRequest("app.model.a", item, 0, item.stored_bytes, None, lambda data: None)])
    assert helpers.load_all(store) == MODEL


def test_a_full_disk_leaves_the_whole_checkpoint(store, helpers, monkeypatch):
    helpers.save_all(store, VALUES)
    before = helpers.names(store)
    create = LocalStore.create

    def full(self, name, **options):
        if name.endswith(".distcp"):
            raise OSError(28, os.strerror(28))
        return create(self, name, **options)

    monkeypatch.setattr(LocalStore, "create", full)
    with pytest.raises(OSError, match="No space"):
        SmallerCheckpoint(store, keep=["app.model"]).publish(by="a test")
    assert helpers.names(store) == before
    assert helpers.load_all(store) == helpers.merged(VALUES)
