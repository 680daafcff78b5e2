"""A process that saves is killed before each call that changes or syncs a file or folder, one after another.

Whatever is left must load as exactly the old or exactly the new checkpoint, and the next save must clean it up.
"""

from __future__ import annotations

import os
import shutil
import time

import pytest

from dcp_crash import Fault, disk_states, mark, run_traced, snapshot
from dcp_crash.faults import WRITING
from dcp_io import LocalStore, verify_checkpoint
from dcp_io.checkpoints.drop_parts import SmallerCheckpoint
from dcp_io.checkpoints.remove_checkpoint import clear_dead_saves
from dcp_io.saves.save_files import find_markers, is_marker_temporary
from dcp_manifest import index_of

pytestmark = pytest.mark.traced

OLD = [{"a": b"1" * 100, "b": b"2" * 70_000}, {"c": b"3" * 10}]
NEW = [{"a": b"x" * 90, "d": b"y" * 80_000}, {"c": b"z" * 20, "e": b"w"}]


def save_later(store, helpers):
    """The next save, so much later that temporary files of markers are old: only their age shows that they are dead.

    The markers themselves stay fresh, so that a dead save is recognised by its process.
    """
    yesterday = time.time() - 24 * 3600
    for name in filter(is_marker_temporary, helpers.names(store)):
        os.utime(os.path.join(store.path, name), (yesterday, yesterday))
    helpers.save_all(store, [{"last": b"1"}], sync=False)


def run_and_kill(root, action, number, kind="kill"):
    """Run `action` in a child that is killed at its call `number`; returns its calls, and whether it was killed."""
    run = run_traced(lambda rank: action(), root, fault=Fault(kind, number))
    (end,) = run.ranks
    assert end.error is None, end.error
    assert end.survived != run.struck
    return end.calls, run.struck


@pytest.fixture(params=[4, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def every(request):
    """Interval of the calls at which the child is killed: every n-th call."""
    return request.param


def check_everywhere(tmp_path, every, prepare, action, after):
    """Kill `action` at its calls, and in the middle of its writes; `after` checks the store each time.

    Returns how many times the new checkpoint was found, and how many times the action was killed.
    """

    def strike(number, kind):
        store = LocalStore(tmp_path / f"{kind}{number}")
        store.make()
        prepare(store)
        calls, struck = run_and_kill(store.path, lambda: action(store), number, kind)
        found.append(after(store))
        return calls, struck

    found, number, struck = [], 1, True
    while struck:
        calls, struck = strike(number, "kill")
        number += every
    for place in [place for place, name in enumerate(calls, 1) if name in WRITING][::every]:
        strike(place, "torn")
    assert len(found) > 20 / every
    return sum(found), len(found) - 1


@pytest.mark.parametrize("single_file", [True, False])
def test_re_save_of_two_ranks(tmp_path, every, helpers, single_file):
    """Neither the checkpoint in the folder nor one beside it is harmed at any point."""
    options = {"single_file": single_file}
    beside = LocalStore(tmp_path / "beside")
    helpers.save_all(beside, OLD)

    def after(store):
        assert helpers.load_all(beside) == helpers.merged(OLD)
        found = helpers.load_all(store)
        assert found in (helpers.merged(OLD), helpers.merged(NEW))
        save_later(store, helpers)
        assert helpers.load_all(store) == {"last": b"1"}
        assert len(store.list()) == 2, helpers.names(store)
        return found == helpers.merged(NEW)

    new, kills = check_everywhere(
        tmp_path,
        every,
        lambda store: helpers.save_all(store, OLD, sync=False, **options),
        lambda store: helpers.save_all(store, NEW, **options),
        after,
    )
    assert 2 / every < new < kills


def test_first_save(tmp_path, every, helpers):
    def after(store):
        exists = store.exists(".metadata")
        assert not exists or helpers.load_all(store) == helpers.merged(NEW)
        save_later(store, helpers)
        assert len(store.list()) == 2, helpers.names(store)
        return exists

    new, kills = check_everywhere(
        tmp_path, every, lambda store: None, lambda store: helpers.save_all(store, NEW), after
    )
    assert 2 / every < new < kills


def test_save_without_a_coordinator(tmp_path, every, helpers):
    def after(store):
        found = helpers.load_all(store)
        assert found in (helpers.merged(OLD), helpers.merged(NEW))
        save_later(store, helpers)
        assert helpers.load_all(store) == {"last": b"1"}
        assert [name for name in helpers.names(store) if name.endswith(".distcp") or "dcp-save" in name] == [
            entry.name for entry in store.list() if entry.name.startswith("__0_0.")
        ]
        return found == helpers.merged(NEW)

    new, kills = check_everywhere(
        tmp_path,
        every,
        lambda store: helpers.save_all(store, OLD, rank_local_id="old", sync=False),
        lambda store: helpers.save_all(store, NEW, rank_local_id="new"),
        after,
    )
    assert 2 / every < new < kills


@pytest.mark.parametrize(("first", "second"), [(None, "new"), ("old", None)])
def test_changing_between_the_two_kinds_of_save(tmp_path, every, helpers, first, second):
    def after(store):
        found = helpers.load_all(store)
        assert found in (helpers.merged(OLD), helpers.merged(NEW))
        return found == helpers.merged(NEW)

    new, kills = check_everywhere(
        tmp_path,
        every,
        lambda store: helpers.save_all(store, OLD, rank_local_id=first, sync=False),
        lambda store: helpers.save_all(store, NEW, rank_local_id=second),
        after,
    )
    assert 2 / every < new < kills


def test_cleanup_of_a_dead_save_may_be_killed_too(tmp_path, every, helpers):
    """A save dies while writing; the next one dies while it cleans up and saves; the third one succeeds."""

    def prepare(store):
        helpers.save_all(store, OLD, sync=False)
        run_and_kill(store.path, lambda: helpers.save_all(store, NEW), 24)
        assert find_markers(store, store.list())

    def after(store):
        found = helpers.load_all(store)
        assert found in (helpers.merged(OLD), helpers.merged(NEW))
        save_later(store, helpers)
        assert len(store.list()) == 2, helpers.names(store)
        return found == helpers.merged(NEW)

    new, kills = check_everywhere(tmp_path, every, prepare, lambda store: helpers.save_all(store, NEW), after)
    assert 0 < new < kills


BOTH = [{"model.a": b"1" * 100, "optimizer.a": b"2" * 70_000}, {"optimizer.b": b"3" * 10, "model.b": b"4" * 9}]
MODEL = {"model.a": b"1" * 100, "model.b": b"4" * 9}


@pytest.mark.parametrize("rank_local_id", [None, "old"])
def test_removal_of_a_part(tmp_path, every, helpers, rank_local_id):
    """The next cleanup, or the same removal again, leaves nothing but the checkpoint."""

    def make_smaller(store):
        SmallerCheckpoint(store, keep=["model"]).publish(by="a test")

    def after(store):
        found = helpers.load_all(store)
        assert found in (helpers.merged(BOTH), MODEL)
        clear_dead_saves(store, stale_after_seconds=3600)
        assert helpers.load_all(store) == found
        indexes = {".metadata"} if found == MODEL or rank_local_id is None else RANK_INDEXES
        files = {name for name in helpers.names(store) if not name.endswith(".tmp")}
        assert files == {*indexes, *index_of(store).files}
        make_smaller(store)
        assert helpers.load_all(store) == MODEL
        assert not verify_checkpoint(store).problems
        return found == MODEL

    new, kills = check_everywhere(
        tmp_path,
        every,
        lambda store: helpers.save_all(store, BOTH, sync=False, rank_local_id=rank_local_id),
        make_smaller,
        after,
    )
    assert 2 / every < new < kills


RANK_INDEXES = {name for rank in range(2) for name in (f"__{rank}.metadata", f"__{rank}.old.metadata")}


def test_loss_of_power_in_the_removal_of_a_part(tmp_path, helpers, every):
    store = LocalStore(tmp_path / "store")
    helpers.save_all(store, BOTH)
    before = snapshot(store.path)

    def make_smaller(_):
        SmallerCheckpoint(store, keep=["model"]).publish(by="a test")
        mark("done")

    run = run_traced(make_smaller, store.path, record=True)
    found = []
    for state in disk_states(before, run.changes, every=every, random_states=2):
        shutil.rmtree(store.path)
        store.make()
        state.put(store.path, recorded=store.path)
        found.append(helpers.load_all(store))
        assert found[-1] in (helpers.merged(BOTH), MODEL)
        assert found[-1] == MODEL or "done" not in state.marks
        make_smaller_again = SmallerCheckpoint(store, keep=["model"])
        make_smaller_again.publish(by="a test")
        assert helpers.load_all(store) == MODEL
        left = {name for name in helpers.names(store) if not name.endswith(".tmp")}
        assert left == {".metadata", *index_of(store).files}
    assert MODEL in found
    assert helpers.merged(BOTH) in found
