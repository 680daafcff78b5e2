"""The promoter as a process: by hand, beside a trainer, killed in the middle, and a second one."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dcp_io import KeepLast
from dcp_tiers import KeepWaiting, Tier, Tiers

TIMEOUT_SECONDS = 60


def start(run: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dcp_tiers.promote", str(run), *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=TIMEOUT_SECONDS)
    return process.returncode, said


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize(
    ("number", "code", "text"), [(signal.SIGINT, 130, "interrupted; the next promoter"), (signal.SIGTERM, -15, "")]
)
def test_a_signal_ends_it_at_once_and_the_next_goes_on(helpers, near, far, number, code, text):
    helpers.save(near, 10)
    size = sum(path.stat().st_size for path in (near / "step-10").iterdir())
    Tiers([Tier(near), Tier(far, rate_bytes_per_second=size / 600)]).write()
    # What is started in the background of a shell ignores SIGINT, and so do its children, unless it is handled here.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = start(near)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until(lambda: any(far.glob("step-10/*.distcp")))
    process.send_signal(number)
    found, said = end(process)
    assert found == code
    assert text in said
    assert "Traceback" not in said
    helpers.tiers().write()
    assert end(start(near))[0] == 0
    assert helpers.loaded(far) == {10: helpers.contents(10)}


def test_by_hand_from_the_folder_of_any_tier(helpers, near, far):
    helpers.save(near, 10)
    helpers.tiers().write()
    assert end(start(near)) == (0, "")
    helpers.save(near, 20)
    assert end(start(far / "run.tiers.toml")) == (0, "")
    assert sorted(helpers.loaded(far)) == [10, 20]


def test_beside_a_trainer_until_it_ends(helpers, near, far):
    helpers.tiers().write()
    promoter = start(near, "--follow")
    helpers.save(near, 10)
    promoter.stdin.write("saved\n")
    promoter.stdin.flush()
    wait_until((far / "step-10" / ".metadata").exists)
    helpers.save(near, 20)  # nobody says so: the trainer is killed
    assert end(promoter)[0] == 0
    assert sorted(helpers.loaded(far)) == [10, 20]


def test_killed_in_the_middle_the_next_one_goes_on(helpers, near, far):
    helpers.save(near, 10)
    Tiers([Tier(near), Tier(far, rate_bytes_per_second=100_000)]).write()
    promoter = start(near)
    journal = far / "step-10" / ".dcp-promoting.json"
    wait_until(lambda: journal.exists() or promoter.poll() is not None)
    promoter.send_signal(signal.SIGKILL)
    promoter.communicate(timeout=TIMEOUT_SECONDS)
    assert not (far / "step-10" / ".metadata").exists()
    before = {path.name: path.stat().st_ino for path in (far / "step-10").glob("*.distcp")}
    helpers.tiers().write()
    assert end(start(near))[0] == 0
    after = {path.name: path.stat().st_ino for path in (far / "step-10").glob("*.distcp")}
    assert [name for name in before if before[name] == after[name]]
    assert helpers.loaded(far) == helpers.loaded(near)


def test_one_at_a_time_on_a_host(helpers, near):
    helpers.tiers().write()
    first = start(near, "--follow")
    wait_until(lambda: is_locked(near / ".dcp-promoter.lock"))
    code, said = end(start(near))
    assert (code, said) == (1, "dcp-tiers: another promoter of this run is at work on this host\n")
    assert end(first)[0] == 0


def test_what_has_not_arrived_is_said(helpers, near, far):
    helpers.save(near, 10)
    helpers.tiers().write()
    far.write_text("not a folder")
    code, said = end(start(near, "--progress-timeout-seconds", "3"))
    assert code == 1
    assert f"dcp-tiers: not in {far}: steps 10" in said
    assert "is tried again in 0.5 s" in said
    assert end(start(far / "other"))[0] == 2


@pytest.mark.parametrize("count", [1, 2])
def test_the_first_tier_keeps_what_waits(helpers, near, far, count):
    from dcp_tiers.promote import promote

    tiers = helpers.tiers(KeepLast(count))
    policy = KeepWaiting(tiers)
    for step in (10, 20, 30):
        helpers.save(near, step)
    assert policy.keep([], 0.0) == {10, 20, 30}.difference([10, 20, 30][:-count])
    promote(tiers)
    assert policy.keep([], 0.0) == set()
    os.rename(far, far.parent / "away")
    helpers.save(near, 40)
    assert policy.keep([], 0.0) == {40}


def is_arrival(event) -> bool:
    return (event.operation, event.phase, event.state) == ("promote", "total", "finished")


@pytest.mark.parametrize("ends", [False, True])
def test_a_tier_that_comes_back_gets_all_in_order(ends, helpers, near, far, events):
    tiers = helpers.tiers(KeepLast(3))
    far.write_text("not a folder: the storage is away")
    for step in (10, 20, 30, 40):
        helpers.save(near, step)
    tiers.start_promoter()
    wait_until(lambda: any(event.phase == "skip" for event in events))
    if ends:
        assert tiers.drain(0.7) == {str(far): [20, 30, 40]}
    far.unlink()
    if ends:
        wait_until(lambda: len(list(far.glob("step-*/.metadata"))) == 3)
    assert tiers.drain(TIMEOUT_SECONDS) == {}
    assert helpers.loaded(far) == {step: helpers.contents(step) for step in (20, 30, 40)}
    arrived = [event.checkpoint_id for event in events if is_arrival(event)]
    assert arrived == [f"{far}/step-{step}" for step in (20, 30, 40)]


def test_gives_up_without_progress_only(helpers, near, far):
    from dcp_tiers.promote import promote

    helpers.save(near, 10)
    size = sum(path.stat().st_size for path in (near / "step-10").iterdir())
    slow = Tiers([Tier(near), Tier(far, rate_bytes_per_second=size / 12)])
    assert promote(slow, progress_timeout_seconds=8) == {}  # takes longer, and goes on


def test_the_trainer_observes_the_promoter(helpers, near, far, events):
    tiers = helpers.tiers()
    helpers.save(near, 10)
    assert tiers.drain(TIMEOUT_SECONDS) == {}
    wait_until(lambda: any(map(is_arrival, events)))
    (end,) = filter(is_arrival, events)
    assert end.checkpoint_id == f"{far}/step-10"
    assert end.bytes == sum(path.stat().st_size for path in (far / "step-10").glob("*.distcp"))


def test_a_pipe_that_nobody_empties_holds_nothing_up():
    from dcp_base import CheckpointEvent
    from dcp_tiers.promoter_process import EventWriter

    reading, writing = os.pipe()
    write = EventWriter(writing)
    for _ in range(5000):
        write(CheckpointEvent("promote", "total", "progress", 0, "x" * 100))
    os.close(reading)
    write(CheckpointEvent("promote", "total", "finished", 0))
    os.close(writing)
