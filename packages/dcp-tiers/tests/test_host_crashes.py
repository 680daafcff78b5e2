"""A host's promoter is killed, meets errors, or loses power at each of its system calls while it brings its part.

Whatever is left: each host has its part, the shared tier has whole checkpoints alone, and the next promoters finish.
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
from dcp_tiers import Tier, Tiers
from dcp_tiers.promotion import Promotion

pytestmark = [pytest.mark.traced, pytest.mark.parametrize("hosts", ["/near/run"], ids=["folder"], indirect=True)]


@pytest.fixture(params=[30, pytest.param(1, marks=pytest.mark.slow)], ids=["tenth", "all"])
def every(request):
    """Interval of the system calls at which something happens."""
    return request.param


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory, if there is such a file system: syncing hundreds of times takes minutes on a busy disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(params=["last", pytest.param("first", marks=pytest.mark.slow)])
def start(request, place, hosts) -> Path:
    """Three hosts with steps 5 and 10: the shared tier has step 5; of step 10 nothing, or all but one host's part."""
    start = place / "start"
    hosts.save_apart(start, 5)
    assert [bring_part(start, hosts, host) for host in "abc"] == [False, False, True]
    hosts.save_apart(start, 10)
    if request.param == "last":
        assert [bring_part(start, hosts, host) for host in "bc"] == [False, False]
    return start


def bring_part(folder: Path, hosts, host: str = "a", *, attempts: int = 3) -> bool:
    """Bring the part of a host; returns whether the shared tier has all that it must get then."""
    more = iter([True] * (attempts - 1))
    with hosts.on_host(folder, host):
        tiers = Tiers([Tier(hosts.near, per_host=True), Tier(folder / "far")])
        arrived = Promotion(tiers, 1).run(lambda _: next(more, False))
    if arrived:
        mark("arrived")
    return arrived


def parts(folder: Path) -> dict[str, bytes]:
    """The data files and indexes of all hosts."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for host in "abc"
        for path in (folder / host).rglob("*")
        if path.suffix == ".distcp" or path.name == ".metadata"
    }


def check(start: Path, folder: Path, helpers, hosts, *, arrived: bool) -> bool:
    """Check what is left, and that the next promoters finish; returns whether step 10 was whole already."""
    far = folder / "far"
    assert parts(folder) == parts(start)
    found = helpers.loaded(far)
    assert found.pop(5) == helpers.contents(5)
    assert found in ({}, {10: helpers.contents(10)})
    is_there = bool(found)
    assert is_there or not arrived
    for path in folder.rglob("*.tmp"):
        os.utime(path, (time.time() - 7200,) * 2)
    for host in "bcabc":
        finished = bring_part(folder, hosts, host, attempts=1)
    assert finished
    assert helpers.loaded(far) == {5: helpers.contents(5), 10: helpers.contents(10)}
    left = {path.name for path in (far / "step-10").iterdir()}
    assert {name for name in left if not name.endswith(".distcp")} == {".metadata", ".dcp-note.json"}, left
    assert len(left) == 5
    return is_there


def strike(start: Path, folder: Path, kind: str, number: int, helpers, hosts) -> tuple[bool, list[str], bool]:
    """Bring a part with a fault at one call; returns whether it struck, the calls, and whether step 10 was whole."""
    shutil.copytree(start, folder)
    run = run_traced(lambda _: bring_part(folder, hosts), folder, fault=Fault(kind, number))
    (end,) = run.ranks
    assert end.error is None, end.error
    is_there = check(start, folder, helpers, hosts, arrived=end.result is True)
    shutil.rmtree(folder)
    return run.struck, end.calls, is_there


def test_killed_at_each_call(start, place, helpers, hosts, every, record_property):
    struck, number, there = True, 1, []
    while struck:
        struck, calls, is_there = strike(start, place / "run", "kill", number, helpers, hosts)
        there.append(is_there)
        number += every
    assert len(there) > 40 / every
    torn = [at for at, name in enumerate(calls, 1) if name in WRITING][::every]
    for at in torn:
        assert strike(start, place / "run", "torn", at, helpers, hosts)[0]
    record_property("states", len(there) + len(torn))


@pytest.mark.parametrize("kind", ["eio", "enospc"])
def test_a_storage_that_fails_at_each_call(start, place, helpers, hosts, every, kind, record_property):
    struck, number, interval = True, 1, every if every == 1 else 4 * every
    while struck:
        struck, _, _ = strike(start, place / "run", kind, number, helpers, hosts)
        number += interval
    assert number > 20
    record_property("states", number // interval)


def test_loss_of_power_at_each_call(start, place, helpers, hosts, every, record_property):
    folder = place / "run"
    shutil.copytree(start, folder)
    before = snapshot(folder)
    run = run_traced(lambda _: bring_part(folder, hosts), folder, record=True)
    assert run.ranks[0].error is None
    states = disk_states(before, run.changes, every=8 * every - 7, random_states=1 if every > 1 else 4)
    count = 0
    for state in states:
        count += 1
        shutil.rmtree(folder)
        folder.mkdir()
        state.put(folder, recorded=folder)
        check(start, folder, helpers, hosts, arrived="arrived" in state.marks)
    record_property("states", count)
