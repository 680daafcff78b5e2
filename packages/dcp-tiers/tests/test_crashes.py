"""A promoter is killed, or meets an error, at each of its system calls; the machine loses its power after each.

Whatever is left: the near tier has its checkpoint, the far one the old, the new or none; the next promoter finishes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_crash import Fault, disk_states, mark, run_traced, snapshot
from dcp_crash.faults import WRITING
from dcp_io import KeepLast, LocalStore
from dcp_io.roots.catalogue import Catalogue
from dcp_tiers import Tier, Tiers
from dcp_tiers.promote import promote
from dcp_tiers.promotion import Promotion

pytestmark = pytest.mark.traced

OLD, NEW, NEXT = ({f"value{n}": bytes([k, n]) * 700 for n in range(2)} for k in range(3))


@pytest.fixture(params=[10, pytest.param(1, marks=pytest.mark.slow)], ids=["tenth", "all"])
def every(request):
    """Interval of the system calls at which something happens."""
    return request.param


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory, if there is such a file system: syncing hundreds of times takes minutes on a busy disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(params=[pytest.param("first", marks=pytest.mark.slow), "again"])
def start(request, place, helpers) -> Path:
    """A folder with both tiers: step 10 waits in the near one; the far one has step 5, and perhaps an older step 10."""
    start = place / "start"
    helpers.save(start / "near", 5, OLD)
    if request.param == "again":
        helpers.save(start / "near", 10, OLD)
    promote(tiers_in(start))
    helpers.save(start / "near", 10, NEW)
    return start


def tiers_in(folder: Path) -> Tiers:
    return Tiers([Tier(folder / "near"), Tier(folder / "far", KeepLast(2))])


def promote_ten(folder: Path) -> bool:
    """Promote, with three attempts; returns whether everything arrived."""
    attempts = iter([True, True])
    arrived = Promotion(tiers_in(folder), 1).run(lambda _: next(attempts, False))
    if arrived:
        mark("arrived")
    return arrived


def age_temporaries(folder: Path) -> None:
    """Make temporary files so old that their writers must be dead."""
    for path in folder.rglob("*.tmp"):
        os.utime(path, (time.time() - 7200,) * 2)


def check(folder: Path, helpers, *, arrived: bool) -> bool:
    """Check what is left, and that the next promoter finishes; returns whether the new checkpoint was there already."""
    near, far = folder / "near", folder / "far"
    assert helpers.loaded(near) == {5: OLD, 10: NEW}
    found = helpers.loaded(far)
    assert found.pop(5) == OLD
    assert found in ({}, {10: OLD}, {10: NEW})
    is_new = found == {10: NEW}
    assert is_new or not arrived
    assert promote(tiers_in(folder)) == {}
    assert helpers.loaded(far) == {5: OLD, 10: NEW}
    age_temporaries(folder)
    helpers.save(near, 20, NEXT)
    assert promote(tiers_in(folder)) == {}
    assert helpers.loaded(far) == {10: NEW, 20: NEXT}
    # A loss of power may leave a lease without contents, whose reader counts as alive until the lease is stale.
    Catalogue(LocalStore(near), stale_after_seconds=30).sweep()
    for step in (10, 20):
        kept = {path.name for path in (near / f"step-{step}").iterdir() if "dcp-promoted-" not in path.name}
        assert {path.name for path in (far / f"step-{step}").iterdir()} == kept
        assert len(kept) == 4  # index, note and two data files
    assert {path.name for path in far.iterdir()} == {"latest", "run.tiers.toml", "step-10", "step-20"}
    return is_new


def strike(start: Path, folder: Path, kind: str, number: int, helpers) -> tuple[bool, list[str], bool]:
    """Promote with a fault at one call; returns whether it struck, the calls, and whether the new one was there."""
    shutil.copytree(start, folder)
    run = run_traced(lambda _: promote_ten(folder), folder, fault=Fault(kind, number))
    (end,) = run.ranks
    assert end.error is None, end.error
    is_new = check(folder, helpers, arrived=end.result is True)
    shutil.rmtree(folder)
    return run.struck, end.calls, is_new


def test_killed_at_each_call(start, place, helpers, every, record_property):
    struck, number, new = True, 1, []
    while struck:
        struck, calls, is_new = strike(start, place / "run", "kill", number, helpers)
        new.append(is_new)
        number += every
    assert len(new) > 40 / every
    assert False in new
    assert new[-1]
    torn = [at for at, name in enumerate(calls, 1) if name in WRITING][::every]
    for at in torn:
        assert strike(start, place / "run", "torn", at, helpers)[0]
    record_property("states", len(new) + len(torn))


@pytest.mark.parametrize("kind", ["eio", "enospc"])
def test_a_storage_that_fails_at_each_call(start, place, helpers, every, kind, record_property):
    struck, number, interval = True, 1, every if every == 1 else 4 * every
    while struck:
        struck, _, _ = strike(start, place / "run", kind, number, helpers)
        number += interval
    assert number > 40
    record_property("states", number // interval)


def test_loss_of_power_at_each_call(start, place, helpers, every, record_property):
    folder = place / "run"
    shutil.copytree(start, folder)
    before = snapshot(folder)
    run = run_traced(lambda _: promote_ten(folder), folder, record=True)
    assert run.ranks[0].result is True
    new = []
    for state in disk_states(before, run.changes, every=8 * every - 7, random_states=1 if every > 1 else 4):
        shutil.rmtree(folder)
        folder.mkdir()
        state.put(folder, recorded=folder)
        new.append(check(folder, helpers, arrived="arrived" in state.marks))
    assert {True, False} == {*new}
    record_property("states", len(new))
