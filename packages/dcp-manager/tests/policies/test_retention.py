"""What is removed after a publish, and what stays whatever a policy says. No checkpoint is saved here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_io import Catalogue, LocalStore
from dcp_io.roots.records import Note
from dcp_manager import KeepAll, KeepEvery, KeepLast, KeepPolicy
from dcp_manager.policies.retention import Retention


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(LocalStore(tmp_path), stale_after_seconds=60)


def checkpoint(root: Path, step: int, created_seconds: float) -> None:
    folder = root / f"step-{step}"
    folder.mkdir()
    (folder / ".metadata").write_text("index")
    (folder / ".dcp-note.json").write_bytes(Note(step, created_seconds, {}, None).to_bytes())


@pytest.mark.parametrize("policy", [KeepLast(1), KeepEvery(1000)], ids=repr)
def test_one_below_older_steps_stays(catalogue: Catalogue, tmp_path: Path, policy: KeepPolicy) -> None:
    for step, created in ((50, 1.0), (100, 2.0), (60, 3.0)):
        checkpoint(tmp_path, step, created)
    assert Retention(catalogue, policy).apply((), published=60) == [50, 100]
    assert [folder.step for folder in catalogue.folders()] == [60]


def test_the_published_one_stays_whatever_the_clocks_say(catalogue: Catalogue, tmp_path: Path) -> None:
    checkpoint(tmp_path, 100, 2.0)
    checkpoint(tmp_path, 60, 1.0)
    assert Retention(catalogue, KeepLast(1)).apply((), published=60) == []


@pytest.mark.parametrize("policy", [KeepLast(1), KeepEvery(1000)], ids=repr)
def test_higher_ones_stay_if_nobody_left_them_behind(catalogue: Catalogue, tmp_path: Path, policy: KeepPolicy) -> None:
    for step, created in ((50, 1.0), (100, 2.0), (200, 3.0), (60, 4.0)):
        checkpoint(tmp_path, step, created)
    catalogue.quarantine(200, "a bit flipped")
    assert Retention(catalogue, policy).apply((), published=60, spares_higher=True) == [50, 200]
    assert [folder.step for folder in catalogue.folders()] == [60, 100]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of calls of the store's methods, by name."""
    made: Counter[str] = Counter()

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            made[name] += 1
            return real(*args, **options)

        return call

    for name in ("list", "folders", "read", "exists", "publish", "delete"):
        monkeypatch.setattr(LocalStore, name, counted(name, getattr(LocalStore, name)))
    return made


@pytest.mark.parametrize("policy", [KeepAll(), KeepLast(1) | KeepAll()], ids=repr)
def test_where_everything_stays_nobody_looks(
    catalogue: Catalogue, tmp_path: Path, calls: Counter[str], policy: KeepPolicy
) -> None:
    checkpoint(tmp_path, 1, 1.0)
    assert Retention(catalogue, policy).apply((), published=1) == []
    assert not calls


def test_each_checkpoint_is_listed_once(catalogue: Catalogue, tmp_path: Path, calls: Counter[str]) -> None:
    retention = Retention(catalogue, KeepLast(50))
    for step in range(50):
        checkpoint(tmp_path, step, step)
    for reads in (50, 0):
        calls.clear()
        assert retention.apply((), published=49) == []
        assert calls == Counter({"list": 50 + 1, "folders": 1, **({"read": reads} if reads else {})})
