"""Training that begins again after its first tier was lost, beside higher steps in a further one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import dcp_all as dcp
from dcp_io import KeepAll, KeepLast, LocalStore
from dcp_io.roots.catalogue import Catalogue
from dcp_io.timed_call import TimedCall
from dcp_manager import CheckpointManager
from dcp_tiers import Tier, Tiers
from dcp_tiers.promote import promote
from integration_tests.hosts.pretended import without_promoter
from integration_tests.kits.damage import lose
from integration_tests.manager.checkpoints import restored, state


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers([Tier(tmp_path / "near", keep=KeepLast(1)), Tier(tmp_path / "far", keep=KeepLast(2))])


@contextmanager
def waited_for() -> Iterator[list[float]]:
    """The seconds of each wait for a place that ended without an answer."""
    found, wait = [], TimedCall.wait

    def noted(self: TimedCall[Any], seconds: float | None) -> None:
        try:
            wait(self, seconds)
        except TimeoutError:
            found.append(max(0.0, seconds or 0.0))
            raise

    with mock.patch.object(TimedCall, "wait", noted):
        yield found


def steps_in(root: Path) -> set[int]:
    return {record.step for record in Catalogue(LocalStore(root), stale_after_seconds=60).records()}


def train(tiers: Tiers, *numbers: int, **options: Any) -> None:
    with without_promoter(), CheckpointManager(tiers, **options) as manager:
        for step in numbers:
            manager.save(step, state(step))
            promote(tiers)


def test_a_lost_first_tier_does_not_hide_higher_steps(tiers: Tiers, tmp_path: Path) -> None:
    train(tiers, 10, 20, 30)
    lose(tmp_path / "near")
    with without_promoter(), CheckpointManager(tiers, lower_steps="raise") as manager:
        for step in (1, 2):
            with pytest.raises(ValueError, match=f"step {step} is lower than step 30, which is in .*/far:"):
                manager.save(step, state(step))
        assert manager.restore(state()).step == 30
        manager.save(31, state(31))
    assert steps_in(tmp_path / "far") == {20, 30}


def test_who_removes_the_higher_steps_need_not_start_again(tiers: Tiers, tmp_path: Path) -> None:
    train(tiers, 10, 20, 30)
    lose(tmp_path / "near")
    with without_promoter(), CheckpointManager(tiers, lower_steps="raise") as manager:
        with pytest.raises(ValueError, match="is lower than step"):
            manager.save(1, state(1))
        lose(tmp_path / "far")
        manager.save(1, state(1))


@pytest.mark.parametrize("policy", ["warn", "allow"])
def test_a_run_that_began_again_loses_nothing(
    tiers: Tiers, tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: Any
) -> None:
    train(tiers, 10, 20, 30)
    lose(tmp_path / "near")
    caplog.clear()
    train(tiers, 1, 2, 3, lower_steps=policy)
    warned = [record.getMessage() for record in caplog.records if "is lower than step 30" in record.getMessage()]
    assert len(warned) == (3 if policy == "warn" else 0)
    assert steps_in(tmp_path / "far") == {2, 3, 20, 30}
    assert restored(tiers) == 30
    train(tiers, 31, 32)
    assert steps_in(tmp_path / "far") == {31, 32}


def test_going_back_to_a_step_of_the_far_tier_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = Tiers([Tier(tmp_path / "near", keep=KeepLast(1)), Tier(tmp_path / "far", keep=KeepAll())])
    train(tiers, 10, 20, 30)
    with without_promoter(), CheckpointManager(tiers, lower_steps="raise") as manager:
        assert manager.restore(state(), step=10).step == 10
        with pytest.raises(ValueError, match="step 20 is lower than step 30"):
            manager.save(20, state(-20))
    assert restored(tiers, step=20) == 20


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_far_tier_that_hangs_holds_up_the_first_save_at_most(
    tiers: Tiers, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_empty: bool
) -> None:
    train(tiers, 10)
    if is_empty:
        lose(tmp_path / "near")
    answer, looked = threading.Event(), []
    real = Catalogue.highest

    def highest(self: Catalogue) -> Any:
        if self.store.url.endswith("far"):
            looked.append(1)
            answer.wait(60)
        return real(self)

    caplog.clear()
    slow = mock.patch.object(Catalogue, "highest", highest)
    with slow, mock.patch("dcp_io.timed_call.TimedCall.SILENT_AFTER_SECONDS", 0.2), without_promoter():
        with CheckpointManager(tiers) as manager:
            for step in (20, 30):
                manager.save(step, state(step))
        answer.set()
    assert len(looked) == 1
    warned = [record.getMessage() for record in caplog.records if "is not known" in record.getMessage()]
    assert len(warned) == is_empty
    assert dcp.latest_valid(tmp_path / "near").step == 30


@pytest.mark.parametrize("hangs", [True, False])
def test_an_answer_that_comes_late_counts(tiers: Tiers, tmp_path: Path, hangs: bool) -> None:
    train(tiers, 10, 20, 30)
    lose(tmp_path / "near")
    is_back, real = threading.Event(), Catalogue.highest

    def highest(self: Catalogue) -> Any:
        if self.store.url.endswith("far") and not is_back.is_set():
            if not hangs:
                raise ConnectionRefusedError("away")
            is_back.wait(60)
        return real(self)

    away = mock.patch.object(Catalogue, "highest", highest)
    waits = mock.patch("dcp_io.timed_call.TimedCall.SILENT_AFTER_SECONDS", 0.5)
    with away, waits, without_promoter(), CheckpointManager(tiers, lower_steps="raise") as manager:
        manager.save(1, state(1))
        with waited_for() as waits_of_the_second:
            manager.save(2, state(2))
        assert sum(waits_of_the_second) == 0  # it waits once
        is_back.set()
        for step in range(3, 1000):
            time.sleep(0.05)
            try:
                manager.save(step, state(step))
            except ValueError:
                return
    pytest.fail("no lower step was refused")


def test_a_tier_that_failed_at_the_start_is_asked_again_at_the_first_save(tiers: Tiers, tmp_path: Path) -> None:
    train(tiers, 10, 20, 30)
    lose(tmp_path / "near")
    asked, real = [], Catalogue.highest

    def highest(self: Catalogue) -> Any:
        if self.store.url.endswith("far"):
            asked.append(1)
            if len(asked) == 1:
                raise ConnectionRefusedError("away")
        return real(self)

    away = mock.patch.object(Catalogue, "highest", highest)
    with away, without_promoter(), CheckpointManager(tiers, lower_steps="raise") as manager:
        manager._upkeep._where._beyond[0]._call.wait(60)
        assert asked == [1]
        with pytest.raises(ValueError, match="is lower than step"):
            manager.save(1, state(1))


def test_two_tiers_that_hang_hold_up_the_first_save_once(tmp_path: Path) -> None:
    tiers = Tiers([Tier(tmp_path / name) for name in ("near", "middle", "far")])
    answer, real = threading.Event(), Catalogue.highest

    def highest(self: Catalogue) -> Any:
        if not self.store.url.endswith("near"):
            answer.wait(60)
        return real(self)

    hang, waits = mock.patch.object(Catalogue, "highest", highest), 2.0
    soon = mock.patch("dcp_io.timed_call.TimedCall.SILENT_AFTER_SECONDS", waits)
    with hang, soon, without_promoter(), CheckpointManager(tiers, close_timeout_seconds=0.1) as manager:
        with waited_for() as waited:
            manager.save(1, state(1))
            manager.save(2, state(2))
        assert waits / 2 < sum(waited) <= waits
        answer.set()


def test_a_far_tier_whose_client_breaks_fails_no_save(
    tiers: Tiers, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Catalogue.highest

    def highest(self: Catalogue) -> Any:
        if self.store.url.endswith("far"):
            raise RuntimeError("a client's own kind of error")
        return real(self)

    monkeypatch.setattr(Catalogue, "highest", highest)
    with without_promoter(), CheckpointManager(tiers, lower_steps="raise") as manager:
        manager.save(10, state(10))
        manager.save(20, state(20))
    assert sum("own kind of error" in record.getMessage() for record in caplog.records) == 1
    assert dcp.latest_valid(tmp_path / "near").step == 20


def test_who_allows_lower_steps_asks_no_further_tier(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], Catalogue.highest

    def highest(self: Catalogue) -> Any:
        asked.append(self.store.url)
        return real(self)

    monkeypatch.setattr(Catalogue, "highest", highest)
    train(tiers, 10, lower_steps="allow")
    assert {*asked} == {tiers.tiers[0].url}
