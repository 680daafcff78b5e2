"""What is promoted, in which order, what is refused, and what is kept in the further tier."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest

from dcp_io import KeepBest, KeepEvery, KeepLast, LocalStore
from dcp_io.checkpoints.verify_checkpoint import PassingCrcs
from dcp_io.saves.save_session import SaveSession
from dcp_io.timed_call import Pace
from dcp_manifest import CorruptCheckpointError
from dcp_tiers import KeepWaiting, Tier, Tiers, promotion
from dcp_tiers.copying import copy_checkpoint
from dcp_tiers.promote import promote
from dcp_tiers.promotion import Promotion
from integration_tests.kits.damage import data_files, flip


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".dcp-promoted-")}


def test_everything_arrives_bit_equal_and_in_order(helpers, near, far, events):
    for step in (9, 10, 100):
        helpers.save(near, step, loss=0.5)
    tiers = helpers.tiers()
    assert promote(tiers) == {}
    for step in (9, 10, 100):
        assert files(near / f"step-{step}") == files(far / f"step-{step}")
    assert (far / "latest").read_text() == "step-100\n"
    assert names(far) == {"latest", "run.tiers.toml", "step-9", "step-10", "step-100"}
    ends = [one for one in events if (one.operation, one.phase, one.state) == ("promote", "total", "finished")]
    done = [os.path.basename(one.checkpoint_id) for one in ends]
    assert done == ["step-9", "step-10", "step-100"]
    events.clear()
    assert promote(tiers) == {}
    assert {event.phase for event in events} == {"waiting"}  # nothing was sent again


def test_a_step_that_was_saved_again_is_promoted_again(helpers, near, far):
    helpers.save(near, 10)
    tiers = helpers.tiers()
    promote(tiers)
    helpers.save(near, 10, {"other": b"5678"})
    promote(tiers)
    assert helpers.loaded(far) == {10: {"other": b"5678"}}
    assert files(near / "step-10") == files(far / "step-10")


def test_an_earlier_save_does_not_replace_a_later_one(helpers, near, far):
    helpers.save(near, 10)
    helpers.save(far, 10, {"later": b"5678"})
    tiers = helpers.tiers()
    assert promote(tiers) == {str(far): [10]}
    assert helpers.loaded(far) == {10: {"later": b"5678"}}
    assert KeepWaiting(tiers).keep([], 0.0) == {10}


def test_each_step_is_copied_once_though_listings_are_old(helpers, near, far, monkeypatch):
    """Listings that take long are used again for a while: what has been copied since is not copied again."""
    for step in (10, 20, 30):
        helpers.save(near, step)
    copied = []

    def copy(source, *arguments, **options):
        copied.append(os.path.basename(source.path))
        return copy_checkpoint(source, *arguments, **options)

    monkeypatch.setattr(promotion, "copy_checkpoint", copy)
    monkeypatch.setattr(promotion, "_QUICK_LISTING_SECONDS", 0.0)
    monkeypatch.setattr(promotion, "_REUSED", 1e6)
    assert promote(helpers.tiers()) == {}
    assert copied == ["step-10", "step-20", "step-30"]


def test_only_what_the_policy_wants_is_sent_and_what_was_superseded_is_reported(helpers, near, far, events):
    for step in (10, 15, 20, 25):
        helpers.save(near, step)
    assert promote(helpers.tiers(KeepLast(1) | KeepEvery(20))) == {}
    assert sorted(helpers.loaded(far)) == [20, 25]
    skipped = [os.path.basename(one.checkpoint_id) for one in events if one.phase == "skip"]
    assert skipped == ["step-10", "step-15"]


def test_a_policy_by_metric_reads_the_notes(helpers, near, far):
    for step, loss in ((10, 0.3), (20, 0.1), (30, 0.2)):
        helpers.save(near, step, loss=loss)
    promote(helpers.tiers(KeepBest(1, "loss")))
    assert sorted(helpers.loaded(far)) == [20]


@pytest.mark.parametrize("number", range(3))
def test_a_damaged_checkpoint_is_not_promoted_and_does_not_hold_up_others(helpers, near, far, events, number):
    helpers.save(near, 10)
    helpers.save(near, 20)
    flip(data_files(near / "step-10")[number])
    assert promote(helpers.tiers()) == {str(far): [10]}
    assert sorted(helpers.loaded(far)) == [20]
    failed = [one for one in events if one.state == "failed"]
    assert len(failed) == 1
    assert "step-10 is damaged and not promoted" in failed[0].error


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_bytes_that_change_after_the_check_are_not_sent_in_full(size):
    from dcp_io import crc32

    data = bytes(range(256)) * 4
    spans = [(0, 10, crc32(data[:10])), (10, 10, 0), (64, 1024, crc32(data[64:]))]

    def pass_on(data: bytes) -> int:
        crcs, passed = PassingCrcs("file", spans), 0
        for position in range(0, len(data), size):
            crcs.take(position, memoryview(data)[position : position + size])
            passed += len(data[position : position + size])
        return passed

    assert pass_on(data) == 1024
    for place in (0, 9, 64, 500, 1023):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(CorruptCheckpointError, match=r"differ from what was saved"):
            pass_on(bytes(changed))


class Unsteady(LocalStore):
    """A store whose writes fail until `left` failures are used up."""

    left = 0

    def child(self, name):
        return Unsteady(os.path.join(self.path, name))

    def create(self, name, *, sync=True):
        if Unsteady.left > 0:
            Unsteady.left -= 1
            raise OSError("no route to the storage")
        return super().create(name, sync=sync)


def unsteady(tiers: Tiers) -> Tiers:
    tiers._stores = (tiers.places[0], Unsteady(tiers.tiers[1].url))
    tiers.catalogues[1]._root = tiers.places[1]
    return tiers


def test_a_failing_storage_is_tried_again_and_sent_files_are_not_sent_again(helpers, near, far, monkeypatch):
    monkeypatch.setattr("dcp_tiers.promotion._FIRST_PAUSE_SECONDS", 0.01)
    helpers.save(near, 10)
    sent = []
    real = LocalStore.create
    monkeypatch.setattr(LocalStore, "create", lambda self, name, **how: sent.append(name) or real(self, name, **how))
    monkeypatch.setattr(Unsteady, "left", 3)
    promotion = Promotion(unsteady(helpers.tiers()), 1)
    waits = []
    assert promotion.run(lambda seconds: not waits.append(seconds))
    assert waits == [0.01, 0.02, 0.04]
    assert len(sent) == len(set(sent)) == 3
    assert sorted(helpers.loaded(far)) == [10]


def fail_in(monkeypatch, folders, names, methods, error):
    """Let the methods of stores fail in these folders, for files with these endings."""

    def failing(real):
        def method(self, *arguments, **options):
            if Path(self.url) in folders and str(arguments[0] if arguments else "").endswith(names):
                raise OSError(error, os.strerror(error), f"{self.url}/{arguments[0] if arguments else ''}")
            return real(self, *arguments, **options)

        return method

    for name in methods:
        monkeypatch.setattr(LocalStore, name, failing(getattr(LocalStore, name)))


@pytest.mark.parametrize(("error", "restarted"), [(errno.EACCES, False), (errno.EIO, True)])
@pytest.mark.parametrize(
    ("tier", "names", "methods"),
    [
        ("near", ".metadata", ["read", "open"]),
        ("near", ".distcp", ["open"]),
        ("far", "", ["create", "publish"]),
        ("far", "", ["list"]),
        ("far", ".distcp", ["create"]),
    ],
)
def test_a_step_that_fails_alone_holds_up_no_other(
    helpers, near, far, monkeypatch, caplog, events, tier, names, methods, error, restarted
):
    bad = {near.parent / tier / f"step-{step}" for step in (10, 20)}
    for step in (10, 20, 30, 40, 50):
        helpers.save(near, step)
    promotion, waits = Promotion(helpers.tiers(), 1), []
    with monkeypatch.context() as broken:
        fail_in(broken, bad, names, methods, error)
        assert not promotion.run(lambda seconds: waits.append(seconds) or len(waits) < 12)
    assert sorted(helpers.loaded(far)) == [30, 40, 50]
    assert promotion.waiting() == [10, 20]
    assert waits[-1] == 60.0, "the pauses grow"
    for step in (10, 20):
        said = [one.getMessage() for one in caplog.records if one.getMessage().startswith(f"step {step} is not")]
        assert len(said) == 1
        assert f"{tier}/step-{step}/" in said[0]
        assert said[0].endswith("Repair the file, or remove the step")
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) <= 5 < len(waits) < len(events)
    promotion = Promotion(helpers.tiers(), 1) if restarted else promotion
    assert promotion.run(lambda _: False)
    assert helpers.loaded(far) == helpers.loaded(near)
    assert promotion.problem is None


@pytest.mark.parametrize("count", range(1, 7))
def test_a_storage_that_comes_back_sets_no_step_aside(helpers, near, far, monkeypatch, caplog, count):
    for step in (10, 20, 30, 40):
        helpers.save(near, step)
    monkeypatch.setattr(Unsteady, "left", count)
    assert Promotion(unsteady(helpers.tiers()), 1).run(lambda _: True)
    assert [text for text in caplog.messages if "is not promoted" in text] == []
    assert caplog.text.count("no route to the storage") == 1
    arrived = sorted((20, 10, 30, 40), key=lambda step: (far / f"step-{step}" / ".metadata").stat().st_mtime_ns)
    assert sorted(arrived[1:]) == arrived[1:], "only the step that found the storage again may come before others"


@pytest.mark.parametrize("count", [1, 5, 6])
def test_a_refused_step_says_nothing_about_the_storage(helpers, near, far, monkeypatch, caplog, count):
    for step in (10, 20, 30, 40):
        helpers.save(near, step)
    for step in (20, 30):
        data = next((near / f"step-{step}").glob("*.distcp"))
        data.write_bytes(bytes(data.stat().st_size))
    monkeypatch.setattr(Unsteady, "left", count)
    promotion = Promotion(unsteady(helpers.tiers()), 1)
    assert promotion.run(lambda _: True)
    assert sorted(promotion.refused) == [20, 30]
    assert [text for text in caplog.messages if "for now" in text] == []
    assert sorted(helpers.loaded(far)) == [10, 40]


def test_parts_of_hosts_keep_their_order(tmp_path, hosts, far, monkeypatch):
    for step in (10, 20):
        hosts.save_apart(tmp_path, step)
    copy = promotion.copy_part

    def fail_for_the_first(source, *arguments, **options):
        if source.url.endswith("step-10"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"{source.url}/.metadata")
        return copy(source, *arguments, **options)

    with hosts.on_host(tmp_path, "a"), monkeypatch.context() as broken:
        broken.setattr(promotion, "copy_part", fail_for_the_first)
        tiers, waits = Tiers([Tier(hosts.near, per_host=True), Tier(far)]), []
        assert not Promotion(tiers, 1).run(lambda seconds: waits.append(seconds) or len(waits) < 5)
        assert not list(far.glob("step-20/*.distcp"))
    hosts.bring(tmp_path, far, "a", "b", "c")
    assert sorted(path.parent.name for path in far.glob("step-*/.metadata")) == ["step-10", "step-20"]


def test_giving_up_says_what_has_not_arrived(helpers, near, far, monkeypatch):
    helpers.save(near, 10)
    monkeypatch.setattr(Unsteady, "left", 1000)
    tiers = unsteady(helpers.tiers())
    promotion = Promotion(tiers, 1)
    assert not promotion.run(lambda _: False)
    assert promotion.problem == "OSError: no route to the storage"
    assert promote(tiers, progress_timeout_seconds=0.1) == {str(far): [10]}


def test_an_interrupted_copy_goes_on_where_it_was(helpers, near, far, monkeypatch):
    save_id = helpers.save(near, 10)
    source, target = LocalStore(near / "step-10"), LocalStore(far / "step-10")

    def interrupt(_: int) -> None:
        if target.exists(".dcp-promoting.json"):  # the first file is there
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint(source, target, stale_after_seconds=60, pace=interrupt)
    (first,) = data_files(far / "step-10")
    before = first.stat().st_ino
    assert not target.exists(".metadata")
    assert copy_checkpoint(source, target, stale_after_seconds=60, pace=Pace(None)) == save_id
    assert first.stat().st_ino == before
    assert files(near / "step-10") == files(far / "step-10")


def test_a_folder_in_which_a_save_is_alive_is_left_alone(helpers, near, far, monkeypatch):
    helpers.save(near, 10)
    session = SaveSession.begin(LocalStore(far / "step-10"))
    promotion = Promotion(helpers.tiers(), 1)
    assert not promotion.run(lambda _: False)
    assert "is being written by save" in promotion.problem
    session.abort()
    assert promotion.run(lambda _: False)
    assert sorted(helpers.loaded(far)) == [10]


def test_the_rate_is_limited(helpers, near, far):
    helpers.save(near, 10)
    tiers = helpers.tiers(rate_bytes_per_second=400_000)
    started = time.monotonic()
    promote(tiers)
    # Three files of 80 kB at 0.4 MB/s; a busy machine only makes it slower.
    assert time.monotonic() - started > 0.55
    assert sorted(helpers.loaded(far)) == [10]


def test_a_tier_that_hangs_does_not_hold_up_another(helpers, near, far, tmp_path, monkeypatch):
    helpers.save(near, 10)
    released = threading.Event()
    tiers = Tiers([Tier(near), Tier(tmp_path / "hangs"), Tier(far)])
    real = LocalStore.create

    def create(self, name, *, sync=True):
        if self.url.startswith(str(tmp_path / "hangs")):
            released.wait(60)
        return real(self, name, sync=sync)

    monkeypatch.setattr(LocalStore, "create", create)
    try:
        assert promote(tiers, progress_timeout_seconds=10) == {str(tmp_path / "hangs"): [10]}
        assert sorted(helpers.loaded(far)) == [10]
    finally:
        released.set()
    assert promote(tiers) in ({}, {str(tmp_path / "hangs"): [10]})


def test_a_storage_that_fails_until_after_the_end_of_an_attempt(helpers, near, far, monkeypatch):
    helpers.save(near, 10)
    promotion = Promotion(helpers.tiers(), 1)
    away = OSError("the storage is away")

    def fail(*_, **__):
        raise away

    with monkeypatch.context() as broken:
        broken.setattr("dcp_tiers.copying.send_file", fail)
        broken.setattr(LocalStore, "delete", fail)
        with pytest.raises(OSError, match="is away"):
            promotion.promote_next()
    assert list((far / "step-10").glob(".dcp-save-*"))
    assert promotion.promote_next()
    assert helpers.loaded(far) == helpers.loaded(near)


def test_an_error_of_any_kind_is_tried_again(helpers, near, far, events, monkeypatch):
    helpers.save(near, 10)
    copy, errors = promotion.copy_checkpoint, [KeyError("a client of a storage"), RecursionError()]

    def fail_first(*arguments, **options):
        if errors:
            raise errors.pop(0)
        return copy(*arguments, **options)

    monkeypatch.setattr(promotion, "copy_checkpoint", fail_first)
    assert Promotion(helpers.tiers(), 1).run(lambda _: True)
    assert sorted(helpers.loaded(far)) == [10]
    retries = [event.error for event in events if (event.phase, event.state) == ("retry", "failed")]
    assert retries == ["KeyError: 'a client of a storage'", "RecursionError: "]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_middle_tier_that_is_away_holds_nothing_up(helpers, near, far, tmp_path, monkeypatch, hangs):
    last = tmp_path / "last"
    tiers = Tiers([Tier(near), Tier(far), Tier(last)])
    helpers.save(near, 10)
    ends = threading.Event()
    if hangs:
        monkeypatch.setattr("dcp_io.timed_call.TimedCall.SILENT_AFTER_SECONDS", 0.1)
        monkeypatch.setattr(tiers.catalogues[1], "folders", ends.wait)
    else:
        far.write_text("not a folder: the storage is away")
    assert Promotion(tiers, 2).run(lambda _: False)
    assert sorted(helpers.loaded(last)) == [10]
    ends.set()


def test_a_storage_that_was_replaced_gets_all_again(helpers, near, far):
    tiers = helpers.tiers(KeepLast(2))
    for step in (10, 20, 30):
        helpers.save(near, step)
        promote(tiers)
    shutil.rmtree(far)
    assert promote(helpers.tiers(KeepLast(2))) == {}
    assert sorted(helpers.loaded(far)) == [20, 30]


def test_one_folder_under_two_names_is_refused(helpers, near, far):
    for step in (10, 20):
        helpers.save(near, step)
    same = Promotion(helpers.tiers(KeepLast(1)), 1)
    far.symlink_to(near)  # before, Tiers would have refused it
    assert not same.run(lambda _: False)
    assert "are the same directory" in str(same.problem)
    assert sorted(helpers.loaded(near)) == [10, 20]


def test_a_folder_that_takes_no_notes_is_promoted_once(helpers, near, far, monkeypatch, caplog):
    def refuse(store, url):
        raise OSError(30, "Read-only file system")

    for step in (10, 20):
        helpers.save(near, step)
    monkeypatch.setattr(promotion, "note_arrival", refuse)
    assert promote(helpers.tiers()) == {}
    assert sorted(helpers.loaded(far)) == [10, 20]
    assert caplog.text.count("is not noted: ") == 2


def test_half_a_copy_says_where_the_whole_was(helpers, near, far, caplog):
    helpers.save(near, 10)

    def fail(count, passed=[]):  # noqa: B006 - counts calls
        passed.append(count)
        if len(passed) > 2:
            raise OSError(5, "the host is lost")

    store = LocalStore(near).child("step-10")
    with pytest.raises(OSError, match="the host is lost"):
        copy_checkpoint(store, LocalStore(far).child("step-10"), stale_after_seconds=30, pace=fail)
    shutil.rmtree(near)
    assert helpers.tiers().latest() is None
    assert f"step 10 is not complete: {far}/step-10 has 2 data files" in caplog.text
    place = f"{near}/step-10 on {socket.gethostname()}"
    assert f"a copy from {place}, where it has 236 KiB, was interrupted" in caplog.text
