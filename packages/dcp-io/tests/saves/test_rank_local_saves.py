"""Saves without a coordinator: every rank begins, publishes and finishes by itself."""

from __future__ import annotations

import pytest

from dcp_io import CheckpointExistsError, SaveInProgressError
from dcp_io.saves.save_files import data_mark
from dcp_io.saves.save_session import RankSaveSession, SaveSession
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import ManifestInfo

OLD, NEW = [{"a": b"1"}, {"b": b"2"}], [{"a": b"3"}, {"c": b"4"}]


def test_nothing_old_goes_before_all_ranks_have_published(store, helpers):
    helpers.save_all(store, OLD)
    before = set(helpers.names(store))
    sessions = [RankSaveSession.begin_rank(store, "new", rank) for rank in range(2)]
    data = [
        encode(helpers.make_index({}, info=ManifestInfo("new", 2, "test", generation=2, rank=rank)))
        for rank in range(2)
    ]
    assert [session.generation for session in sessions] == [2, 2]
    sessions[0].publish("__0.new.metadata", data[0])
    sessions[0].publish("__0.metadata", data[0])
    sessions[0].finish(())
    assert before < set(helpers.names(store))
    assert helpers.load_all(store) == helpers.merged(OLD)
    sessions[1].publish("__1.new.metadata", data[1])
    sessions[1].publish("__1.metadata", data[1])
    sessions[1].finish(())
    assert helpers.names(store) == ["__0.metadata", "__0.new.metadata", "__1.metadata", "__1.new.metadata"]


def test_ranks_of_one_save_do_not_refuse_each_other_but_other_saves(store):
    sessions = [RankSaveSession.begin_rank(store, "new", rank) for rank in range(3)]
    for begin in (SaveSession.begin, lambda store: RankSaveSession.begin_rank(store, "other", 0)):
        with pytest.raises(SaveInProgressError):
            begin(store)
    for session in sessions:
        session.abort()
    assert store.list() == []


def test_an_id_is_used_once(store, helpers):
    helpers.save_all(store, OLD, rank_local_id="one")
    with pytest.raises(CheckpointExistsError, match="rank 1: save id 'one' was used before"):
        RankSaveSession.begin_rank(store, "one", 1)
    live = RankSaveSession.begin_rank(store, "two", 0)
    with pytest.raises(CheckpointExistsError, match="'two' was used before"):
        RankSaveSession.begin_rank(store, "two", 0)
    assert store.exists(".dcp-save-two.r0")
    live.abort()


def test_abort_removes_only_what_this_rank_wrote(store):
    sessions = [RankSaveSession.begin_rank(store, "new", rank) for rank in (1, 11)]
    for rank in (1, 11):
        store.publish(f"__{rank}_0.new.distcp", data_mark("new"))
    sessions[0].abort()
    assert store.exists("__11_0.new.distcp")
    assert not store.exists("__1_0.new.distcp")
    sessions[1].abort()
    assert store.list() == []


def test_abort_after_publishing_leaves_it_to_the_next_save(store, helpers):
    helpers.save_all(store, OLD)
    session = RankSaveSession.begin_rank(store, "new", 0)
    store.publish("__0_0.new.distcp", data_mark("new"))
    data = encode(helpers.make_index({}, info=ManifestInfo("new", 2, "test", generation=2, rank=0)))
    session.publish("__0.new.metadata", data)
    session.abort()
    assert store.exists("__0_0.new.distcp")
    assert helpers.load_all(store) == helpers.merged(OLD)
    helpers.save_all(store, NEW)
    assert not store.exists("__0_0.new.distcp")
    assert not store.exists("__0.new.metadata")


def test_fewer_ranks_replace_more(store, helpers):
    helpers.save_all(store, [{"a": b"1"}, {"b": b"2"}, {"c": b"3"}], rank_local_id="one")
    helpers.save_all(store, [{"a": b"4"}], rank_local_id="two")
    assert helpers.load_all(store) == {"a": b"4"}
    assert helpers.names(store) == ["__0.metadata", "__0.two.metadata", "__0_0.two.distcp"]
    helpers.save_all(store, NEW)
    assert helpers.load_all(store) == helpers.merged(NEW)
    assert all(name == ".metadata" or name.endswith(".distcp") for name in helpers.names(store))
