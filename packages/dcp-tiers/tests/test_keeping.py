"""What a further tier keeps of what it has got, and what the nearer ones keep for it."""

from __future__ import annotations

import errno
import shutil

import pytest

from dcp_io import KeepAll, KeepBest, KeepEvery, KeepLast
from dcp_io.checkpoints.drop_parts import SmallerCheckpoint
from dcp_tiers import Tier, Tiers, promotion
from dcp_tiers.copying import copy_checkpoint
from dcp_tiers.promote import main, promote
from dcp_tiers.promotion import Promotion
from dcp_tiers.removal import retain_in_first


def test_the_further_tier_keeps_by_its_own_policy(helpers, near, far):
    tiers = helpers.tiers(KeepLast(2))
    for step in (10, 20, 30):
        helpers.save(near, step)
        promote(tiers)
    assert sorted(helpers.loaded(far)) == [20, 30]
    assert sorted(helpers.loaded(near)) == [10, 20, 30]


@pytest.mark.parametrize("put_off", [False, True])
def test_a_higher_step_than_the_last_that_arrived_stays(helpers, near, far, monkeypatch, put_off):
    if put_off:
        monkeypatch.setattr(promotion, "_QUICK_SECONDS", 0.0)
        monkeypatch.setattr(promotion, "_RARELY", 1e6)
    promoting = Promotion(helpers.tiers(KeepLast(3)), 1)
    for steps in ((10, 20, 30), (1, 2, 3)):
        shutil.rmtree(near, ignore_errors=True)
        for step in steps:
            helpers.save(near, step)
        for _ in steps:
            assert promoting.promote_next()
    assert not promoting.promote_next()
    assert {10, 20, 30} <= {*helpers.loaded(far)}


def test_a_middle_tier_keeps_what_a_further_one_must_still_get(helpers, near, far, tmp_path):
    last = tmp_path / "last"
    tiers = Tiers([Tier(near), Tier(far, KeepLast(1)), Tier(last)])
    middle = Promotion(tiers, 1)
    for step in (10, 20):
        helpers.save(near, step)
        while middle.promote_next():
            pass
    assert sorted(helpers.loaded(far)) == [10, 20]
    assert promote(tiers) == {}
    helpers.save(near, 30)
    promote(tiers)
    assert sorted(helpers.loaded(last)) == [10, 20, 30]
    promote(tiers)
    helpers.save(near, 40)
    promote(tiers)
    assert sorted(helpers.loaded(last)) == [10, 20, 30, 40]
    assert 10 not in helpers.loaded(far)


def test_what_the_further_tier_has_dropped_does_not_come_back(helpers, near, far):
    tiers = helpers.tiers(KeepBest(1, "loss"))
    helpers.save(near, 10, loss=0.1)
    promote(tiers)
    shutil.rmtree(near / "step-10")  # by the policy of the nearer tier
    helpers.save(near, 20, loss=0.5)
    promote(tiers)
    helpers.save(near, 30, loss=0.3)
    promote(tiers)
    there = sorted(helpers.loaded(far))
    assert promote(helpers.tiers(KeepBest(1, "loss"))) == {}
    assert sorted(helpers.loaded(far)) == there


def test_a_full_disk_is_rid_of_what_nobody_waits_for(helpers, near, far, monkeypatch):
    helpers.save(near, 10)
    shutil.copytree(near, far, ignore=shutil.ignore_patterns(".metadata"))  # an interrupted copy
    helpers.save(near, 20)

    def copy(*arguments, **options):
        if (far / "step-10").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return copy_checkpoint(*arguments, **options)

    monkeypatch.setattr(promotion, "copy_checkpoint", copy)
    monkeypatch.setattr(promotion, "_FIRST_PAUSE_SECONDS", 0.01)
    assert promote(helpers.tiers(KeepLast(1)), progress_timeout_seconds=30) == {}
    assert helpers.loaded(far) == {20: helpers.contents(20)}


@pytest.mark.parametrize("how", ["process", "by hand"])
@pytest.mark.parametrize(("near_keep", "left"), [(KeepLast(2), [40, 50]), (KeepEvery(20), [20, 40, 50])])
def test_the_first_tier_keeps_nothing_for_others_once_they_have_it(helpers, near, far, how, near_keep, left):
    tiers = Tiers([Tier(near, near_keep), Tier(far)])
    for step in (10, 20, 30, 40, 50):
        helpers.save(near, step)
    if how == "process":
        assert tiers.drain(60) == {}
    else:
        tiers.write()
        assert main([str(near)]) == 0
    assert sorted(helpers.loaded(near)) == left
    assert sorted(helpers.loaded(far)) == [10, 20, 30, 40, 50]


def test_the_first_tier_keeps_what_has_not_arrived(helpers, near, far):
    tiers = Tiers([Tier(near, KeepLast(1)), Tier(far, KeepEvery(20))])
    far.write_text("not a folder: the storage is away")
    for step in (10, 20, 30, 40):
        helpers.save(near, step)
    assert promote(tiers, progress_timeout_seconds=0.0) == {str(far): [20, 40]}
    retain_in_first(tiers)
    assert sorted(helpers.loaded(near)) == [20, 40]


def test_the_first_tier_keeps_what_a_manager_with_a_policy_of_its_own_keeps(helpers, near, far):
    tiers = Tiers([Tier(near, KeepLast(1)), Tier(far)])
    policy = tiers.kept_by(KeepLast(3))
    for step in (10, 20, 30, 40):
        helpers.save(near, step)
    assert policy.keep([], 0.0) == {10, 20, 30, 40}
    assert tiers.drain(60) == {}
    assert sorted(helpers.loaded(near)) == [10, 20, 30, 40]
    assert policy.keep(tiers.catalogues[0].records(), 0.0) == {20, 30, 40}


def test_a_run_that_went_back_keeps_its_higher_steps(helpers, near, far):
    tiers = Tiers([Tier(near, KeepLast(1)), Tier(far)])
    for step in (10, 50, 20):
        helpers.save(near, step)
    assert promote(tiers) == {}
    retain_in_first(tiers)
    assert sorted(helpers.loaded(near)) == [20, 50]


WHOLE = {"m.a": b"1" * 3000, "o.a": b"2" * 9000}
MODEL = {"m.a": b"1" * 3000}


def test_each_tier_keeps_its_own_parts(helpers, near, far):
    """What a further tier gets is whole, and neither copy replaces the other later."""
    tiers = Tiers([Tier(near, KeepLast(1) | KeepAll(parts=["m"])), Tier(far, KeepLast(2) | KeepEvery(20, parts=["m"]))])
    for step in (10, 20, 30):
        helpers.save(near, step, WHOLE)
        retain_in_first(tiers)
    assert helpers.loaded(near) == {10: MODEL, 20: WHOLE, 30: WHOLE}  # the far tier wants the last two, and waits
    assert promote(tiers) == {}
    for step in (40, 50):
        helpers.save(near, step, WHOLE)
        assert promote(tiers) == {}
        retain_in_first(tiers)
    assert helpers.loaded(near) == {**dict.fromkeys((10, 20, 30, 40), MODEL), 50: WHOLE}
    assert helpers.loaded(far) == {20: MODEL, 40: WHOLE, 50: WHOLE}
    before = {path: path.stat().st_mtime_ns for path in far.rglob("*.distcp")}
    assert promote(tiers) == {}
    assert helpers.loaded(far) == {20: MODEL, 40: WHOLE, 50: WHOLE}
    assert {path: path.stat().st_mtime_ns for path in far.rglob("*.distcp")} == before


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("smaller", [(), (0,), (1,), (0, 1)])
def test_a_copy_of_which_parts_were_removed_is_still_there(helpers, near, far, smaller):
    tiers = helpers.tiers(KeepAll())
    helpers.save(near, 10, WHOLE)
    promote(tiers)
    for number in smaller:
        SmallerCheckpoint(tiers.catalogues[number].store_of(10), keep=["m"]).publish(by="a test")
    for note in (near / "step-10").glob(".dcp-promoted-*"):
        note.unlink()
    files = names(far / "step-10")
    assert promote(tiers) == {}
    assert names(far / "step-10") == files
    assert helpers.loaded(far) == {10: MODEL if 1 in smaller else WHOLE}
    shutil.rmtree(far / "step-10")
    promote(helpers.tiers(KeepAll()))
    assert helpers.loaded(far) == {10: MODEL if 0 in smaller else WHOLE}
    helpers.save(near, 10, {"m.a": b"3"})  # training went back
    promote(tiers)
    assert helpers.loaded(far) == {10: {"m.a": b"3"}}
