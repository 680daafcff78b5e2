"""Two trainers of one run on a host: one promoter works, the other waits, and hands on what it hears."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from dcp_tiers import Tier, Tiers
from dcp_tiers.promote import PromoterLock, Trainer, stand_by
from dcp_tiers.promoter_process import END
from dcp_tiers.tiers import lacking_steps

TIMEOUT_SECONDS = 60
NO_ID = str  # the id of a host's place, which a folder does not need


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_the_lock(tiers) -> bool:
    """Whether another process has the lock of promoters."""
    with PromoterLock(tiers.places[0], NO_ID) as lock:
        return not lock.take()


def test_the_one_at_work_hears_of_what_the_other_trainer_saves(helpers, near, far):
    first, second = helpers.tiers(), helpers.tiers()
    first.start_promoter()
    helpers.save(near, 10)
    first.wake_promoter()
    wait_until((far / "step-10" / ".metadata").exists)
    second.start_promoter()
    helpers.save(near, 20)
    second.wake_promoter()  # only the second trainer says so
    assert second.drain(TIMEOUT_SECONDS) == {}
    assert sorted(helpers.loaded(far)) == [10, 20]
    assert first.drain(TIMEOUT_SECONDS) == {}


def test_who_has_saved_nothing_does_not_wait_for_the_other(helpers, near, far):
    far.write_text("not a folder: the storage is away")
    trainer, evaluator = helpers.tiers(), helpers.tiers()
    helpers.save(near, 10)
    trainer.start_promoter()
    wait_until(lambda: has_the_lock(trainer))
    evaluator.start_promoter()
    evaluator.end_promoter()  # without a limit: its promoter ends
    assert lacking_steps(evaluator) == {str(far): [10]}
    far.unlink()
    assert trainer.drain(TIMEOUT_SECONDS) == {}


def test_the_other_takes_over_when_the_first_is_killed(helpers, near, far):
    helpers.save(near, 10)
    reading, writing = os.pipe()
    os.write(writing, b"saved\n")
    place = helpers.tiers().places[0]
    with PromoterLock(place, NO_ID) as first, PromoterLock(place, NO_ID) as second:
        assert first.take()
        assert not second.take()
        os.close(writing)
        trainer = Trainer(reading, is_parent=False)
        assert not stand_by(helpers.tiers(), second, trainer, 0.0)  # without patience
        assert trainer.has_saved
        first.is_asked()
        second.ask()
        assert first.is_asked()
        assert not first.is_asked()
        first.close()
        assert stand_by(helpers.tiers(), second, trainer, 0.0)
    os.close(reading)


def test_a_pipe_that_a_forked_child_holds_does_not_keep_the_trainer_alive():
    reading, writing = os.pipe()
    trainer = Trainer(reading, is_parent=True)
    assert not trainer.wait(0.0)
    trainer._parent = -1  # as after the death of the parent
    assert trainer.wait(0.0)
    assert trainer.has_ended
    os.close(reading)
    os.close(writing)


def test_the_output_of_a_trainer_ends_with_it(near, far):
    """As `python train.py | tee log`, or over ssh: a promoter that goes on must not hold the pipes."""
    far.write_text("not a folder: the storage is away")
    code = (
        "import sys; from dcp_tiers import Tier, Tiers; from dcp_io import LocalStore\n"
        "tiers = Tiers([Tier(sys.argv[1]), Tier(sys.argv[2])])\n"
        "tiers.start_promoter(); tiers.drain(0.0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(near), str(far)], capture_output=True, timeout=TIMEOUT_SECONDS, check=True
    )
    assert done.stdout == b""


def test_what_the_promoter_logs_reaches_the_logging_of_the_trainer(helpers, near, far, caplog):
    far.write_text("not a folder: the storage is away")
    helpers.save(near, 10)
    tiers = helpers.tiers()
    tiers.start_promoter()
    wait_until(lambda: "is tried again in" in caplog.text)
    (record,) = [each for each in caplog.records if "is tried again in 0.5 s" in each.getMessage()]
    assert (record.levelname, record.name) == ("WARNING", "dcp_tiers.promoter_process")
    far.unlink()
    assert tiers.drain(TIMEOUT_SECONDS) == {}


@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_folder_that_cannot_be_written_has_no_lock(near, monkeypatch, is_read_only):
    near.mkdir()
    place = Tiers([Tier(near)]).places[0]
    if is_read_only:  # also for root, who may write anywhere

        def refuse(path, *arguments):
            raise PermissionError(13, "Permission denied", path)

        monkeypatch.setattr(os, "open", refuse)
    with PromoterLock(place, NO_ID) as one, PromoterLock(place, NO_ID) as other:
        assert one.take()
        assert other.take() is is_read_only
        one.ask()


def test_what_is_left_is_an_event(helpers, near, far, events):
    other = far.parent / "other"
    tiers = Tiers([Tier(near), Tier(far), Tier(other)])
    far.write_text("not a folder: the storage is away")
    for step in (10, 20):
        helpers.save(near, step)
    Tiers([Tier(near), Tier(other)]).drain(TIMEOUT_SECONDS)
    helpers.save(near, 30)
    other.rename(f"{other}-away")
    other.write_text("not a folder: the storage is away")
    tiers.end_promoter(1.0)
    said = {event.checkpoint_id: event.error for event in events if event.phase == "left"}
    assert said == {
        str(far): f"{far} lacks steps 10, 20, 30; {near} alone has 30",
        str(other): f"{other} lacks steps 30; {near} alone has 30",
    }
    far.unlink()
    other.unlink()
    os.rename(f"{other}-away", other)
    assert tiers.drain(TIMEOUT_SECONDS) == {}
    assert lacking_steps(tiers) == {}


@pytest.mark.parametrize(("heard", "has_saved"), [(END, False), (b"saved\n" + END, True)])
def test_a_trainer_says_that_it_has_ended_though_a_forked_child_holds_the_pipe(heard, has_saved):
    reading, writing = os.pipe()
    trainer = Trainer(reading, is_parent=True)
    os.write(writing, heard)
    assert trainer.wait(0.0)
    assert (trainer.has_ended, trainer.has_saved) == (True, has_saved)
    os.close(reading)
    os.close(writing)


def test_a_forked_child_of_the_trainer_does_not_hold_up_the_end(near):
    tiers = Tiers([Tier(near), Tier(near.parent / "far")])
    tiers.start_promoter()
    held = os.dup(tiers._promoter._process.stdin.fileno())  # as a worker of a data loader holds it
    assert tiers._promoter.end(TIMEOUT_SECONDS)
    os.close(held)


def test_a_promoter_that_is_stopped_does_not_hold_up_the_trainer(near):
    tiers = Tiers([Tier(near), Tier(near.parent / "far")])
    tiers.start_promoter()
    process = tiers._promoter._process
    process.send_signal(signal.SIGSTOP)
    fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, 4096)
    saves = threading.Thread(target=lambda: [tiers.wake_promoter() for _ in range(2000)], daemon=True)
    saves.start()
    saves.join(TIMEOUT_SECONDS / 4)
    hangs = saves.is_alive()
    process.kill()
    tiers._promoter.leave()
    assert process.wait(TIMEOUT_SECONDS) == -signal.SIGKILL
    assert not hangs


def test_the_end_of_a_run_whose_first_tier_was_lost_is_no_error(helpers, near, far, caplog):
    tiers = helpers.tiers()
    tiers.start_promoter()
    process = tiers._promoter._process
    near.rename(f"{near}-away")
    near.write_text("not a folder")
    tiers.end_promoter(TIMEOUT_SECONDS)
    process.kill()
    assert process.wait(TIMEOUT_SECONDS) == -signal.SIGKILL
    assert f"what further tiers lack of {near} is not known" in caplog.text


def test_draining_finds_that_a_tier_was_replaced_by_an_empty_one(helpers, near, far):
    helpers.save(near, 10)
    assert helpers.tiers().drain(TIMEOUT_SECONDS) == {}
    shutil.rmtree(far)
    assert helpers.tiers().drain(TIMEOUT_SECONDS) == {}
    assert helpers.loaded(far) == {10: helpers.contents(10)}
