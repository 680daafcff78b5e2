"""A tier within its byte budget: what goes first, what is never removed, and what wins when it is full."""

from __future__ import annotations

import shutil

import pytest

from dcp_io import KeepLast
from dcp_tiers import Tier, Tiers, TiersError, removal
from dcp_tiers.promote import promote
from dcp_tiers.promotion import Promotion

SIZE = 250_000
"""A little more than one checkpoint takes."""


@pytest.fixture
def make(near, far):
    def make(count: float, when_full: str = "wait", keep: KeepLast | None = None) -> Tiers:
        first = Tier(near, KeepLast(1), max_bytes=int(count * SIZE), when_full=when_full)
        return Tiers([first, Tier(far, keep or KeepLast(9))])

    return make


def steps(root) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()}


def test_what_has_arrived_goes_first(make, helpers, near):
    tiers = make(3, "drop")
    helpers.save(near, 10)
    promote(tiers)
    helpers.save(near, 20)
    helpers.save(near, 30)
    assert tiers.make_room(40, hurry=False)
    assert steps(near) == {"step-20", "step-30"}


@pytest.mark.parametrize("when_full", ["wait", "drop"])
def test_full_of_what_waits(when_full, make, helpers, near, events):
    tiers = make(3, when_full)
    for step in (10, 20, 30):
        helpers.save(near, step)
    assert tiers.make_room(40, hurry=False) is (when_full == "drop")
    dropped = [event.checkpoint_id for event in events if event.phase == "drop"]
    assert dropped == ([f"{near}/step-10"] if when_full == "drop" else [])
    assert tiers.make_room(40, hurry=True)
    assert steps(near) == {"step-20", "step-30"}
    assert tiers.make_room(40, hurry=False)


def test_there_is_room_when_the_slow_tier_has_it(make, helpers, near):
    tiers = make(3)
    for step in (10, 20, 30):
        helpers.save(near, step)
    assert not tiers.make_room(40, hurry=False)
    promote(tiers)
    assert tiers.make_room(40, hurry=False)
    assert steps(near) == {"step-20", "step-30"}


def test_the_newest_stays_and_nobody_waits_for_more(make, helpers, near):
    tiers = make(0.5, "drop")
    helpers.save(near, 10)
    assert tiers.make_room(20, hurry=False)
    assert steps(near) == {"step-10"}


def test_nobody_waits_for_what_is_refused(make, helpers, near):
    tiers = make(3)
    for step in (10, 20, 30):
        helpers.save(near, step)
    path = min((near / "step-10").glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    promotion = Promotion(tiers, 1)
    promotion.promote_next()
    assert [*promotion.refused] == [10]
    assert tiers.make_room(40, hurry=False)
    assert steps(near) == {"step-20", "step-30"}


def test_the_budget_of_the_last_tier(helpers, near, far):
    for step in (10, 20, 30):
        helpers.save(near, step)
    full = Tiers([Tier(near), Tier(far, max_bytes=2 * SIZE)])
    promotion = Promotion(full, 1)
    assert not promotion.run(lambda _: False)
    assert promotion.waiting() == [30]
    assert f"{far} is full: step 30 waits until its budget is raised (max_bytes)" in str(promotion.problem)
    assert steps(far) >= {"step-10", "step-20"}
    assert promote(Tiers([Tier(near), Tier(far, max_bytes=2 * SIZE, when_full="drop")])) == {}
    assert steps(far) == {"step-20", "step-30"}
    assert helpers.loaded(far)[30] == helpers.contents(30)


def test_what_was_dropped_does_not_come_again(helpers, near, far):
    for step in (10, 20, 30):
        helpers.save(near, step)
    for _ in range(3):
        assert promote(Tiers([Tier(near), Tier(far, max_bytes=2 * SIZE, when_full="drop")])) == {}
        assert steps(far) == {"step-20", "step-30"}
    shutil.rmtree(far)
    assert promote(Tiers([Tier(near), Tier(far, max_bytes=2 * SIZE, when_full="drop")])) == {}
    assert steps(far) == {"step-20", "step-30"}


def test_the_bytes_that_wait_are_told(make, helpers, near, far, events):
    tiers = make(9)
    for step in (10, 20):
        helpers.save(near, step)
    promote(tiers)
    told = [event for event in events if (event.phase, event.checkpoint_id) == ("waiting", str(far))]
    sizes = [event.bytes for event in told]
    assert sizes[0] > sizes[1] > sizes[2] == 0
    assert sizes[1] == pytest.approx(sum(map(len, helpers.contents(20).values())), rel=0.05)


@pytest.mark.parametrize(("options", "said"), [({"max_bytes": 0}, "max_bytes is 0"), ({"when_full": "x"}, "'wait' or")])
def test_wrong_options(near, options, said):
    with pytest.raises(TiersError, match=said):
        Tier(near, **options)


def test_other_processes_read_the_budget(make, near):
    make(3, "drop").write()
    first = Tiers.read(near).tiers[0]
    assert (first.max_bytes, first.when_full) == (3 * SIZE, "drop")


def test_without_a_budget_the_disk_is_the_limit(helpers, near, far, monkeypatch):
    tiers = helpers.tiers()
    for step in (10, 20, 30):
        helpers.save(near, step)
    assert tiers.make_room(40, hurry=False)
    monkeypatch.setattr(removal, "_free_bytes", lambda _: 10_000)  # notes differ by some bytes
    assert not tiers.make_room(40, hurry=False)  # the slow tier has none of them
    assert sorted(helpers.loaded(near)) == [10, 20, 30]
    assert promote(tiers) == {}
    assert tiers.make_room(40, hurry=False)
    assert sorted(helpers.loaded(near)) == [20, 30]
    helpers.save(near, 40)
    far.rename(far.parent / "away")
    assert tiers.make_room(50, hurry=False)
    assert not Tiers([Tier(near), Tier(far.parent / "other")]).make_room(50, hurry=False)
    assert Tiers([Tier(near), Tier(far.parent / "other")]).make_room(50, hurry=True)
    assert sorted(helpers.loaded(near)) == [40]


def test_a_disk_with_plenty_of_room_is_not_listed(helpers, near, monkeypatch):
    tiers = helpers.tiers()
    helpers.save(near, 10)
    assert tiers.make_room(20, hurry=False)
    monkeypatch.setattr(tiers.catalogues[0], "folders", None)
    assert tiers.make_room(30, hurry=False)
