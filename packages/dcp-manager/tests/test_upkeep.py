"""Maintenance of a root: which checkpoints retention keeps, and which steps `lower_steps` lets pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_io import LocalStore
from dcp_io.roots.catalogue import Catalogue
from dcp_io.roots.records import Note
from dcp_manager import KeepAll, KeepBest, KeepEvery, KeepLast, KeepPolicy
from dcp_manager.upkeep import LowerSteps, Retention, StepGuard
from dcp_manifest import CheckpointIndex
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import ManifestInfo


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(LocalStore(tmp_path), stale_after_seconds=60)


def checkpoint(root: Path, step: int, created_seconds: float) -> None:
    folder = root / f"step-{step}"
    folder.mkdir()
    (folder / ".metadata").write_bytes(encode(CheckpointIndex(info=ManifestInfo(f"save-{step}", 1, "test"))))
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
    retention = Retention(catalogue, KeepLast(10) | KeepEvery(1))
    for step in range(50):
        checkpoint(tmp_path, step, step)
    calls.clear()
    # Once in a process it looks into the notes, and at index and files of those that are counted.
    assert retention.apply((), published=49) == []
    assert calls == Counter({"list": 50 + 1 + 2 * 10, "folders": 1, "read": 50 + 10})
    calls.clear()
    assert retention.apply((), published=49) == []
    assert calls == Counter({"list": 50 + 1, "folders": 1})


@pytest.mark.parametrize("policy", [KeepLast(2), KeepBest(2, "loss"), KeepLast(1) | KeepBest(2, "loss")], ids=repr)
def test_what_is_incomplete_is_not_counted(catalogue: Catalogue, tmp_path: Path, policy: KeepPolicy) -> None:
    for step in (1, 2, 3, 4, 5):
        checkpoint(tmp_path, step, step)
        note = Note(step, step, {"loss": 1 / step}, None)
        (tmp_path / f"step-{step}" / ".dcp-note.json").write_bytes(note.to_bytes())
    (tmp_path / "step-4" / ".metadata").write_bytes(b"damaged")
    assert Retention(catalogue, policy).apply((), published=5) == [1, 2]
    assert [folder.step for folder in catalogue.folders()] == [3, 4, 5]  # what is damaged stays while it is looked at


# The highest checkpoint, what is being saved, the step to be saved, whether it is too low.
CASES = [
    (None, (), 0, False),
    (20, (), 21, False),
    (20, (), 20, False),
    (20, (), 19, True),
    (20, (), 0, True),
    (None, (5,), 4, True),
    (None, (5,), 5, False),
    (20, (30,), 25, True),
    (10**20, (), 10**20 - 1, True),
]


@pytest.mark.parametrize(("highest", "running", "step", "low"), CASES)
@pytest.mark.parametrize("policy", ["warn", "raise", "allow"])
def test_a_lower_step(
    policy: LowerSteps,
    highest: int | None,
    running: tuple[int, ...],
    step: int,
    low: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = StepGuard("run/step-{}".format, policy)
    if low and policy == "raise":
        with pytest.raises(ValueError, match=f"step {step} is lower than step .*dcp rm run/step-"):
            guard.check(step, highest, running)
    else:
        guard.check(step, highest, running)
    assert (f"take step {max((*running, highest or 0))}, not step {step}" in caplog.text) == (low and policy == "warn")


def test_reaching_the_highest_from_below_replaces_it(caplog: pytest.LogCaptureFixture) -> None:
    guard = StepGuard("run/step-{}".format, "warn")
    for step, said in ((8, ""), (6, "step 6 is lower"), (8, "run/step-8 is replaced"), (9, ""), (8, "")):
        caplog.clear()
        guard.check(step, 8)
        assert said in caplog.text
        assert bool(said) == bool(caplog.text), step


@pytest.mark.parametrize(
    ("policy", "restored", "published", "spares"),
    [
        ("warn", None, 5, True),
        ("warn", 5, 6, False),
        ("warn", 8, 2, True),  # restored, and began at 0 nevertheless
        ("allow", None, 5, False),
        ("raise", None, 5, True),
    ],
)
def test_higher_steps_are_left_behind_on_purpose_only(
    policy: LowerSteps, restored: int | None, published: int, spares: bool
) -> None:
    guard = StepGuard("run/step-{}".format, policy)
    if restored is not None:
        guard.restored(restored)
    assert guard.spares_higher(published) == spares


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="lower_steps is 'ignore'; choose"):
        StepGuard("run/step-{}".format, "ignore")  # type: ignore[arg-type]
