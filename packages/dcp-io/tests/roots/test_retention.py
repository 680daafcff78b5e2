"""Which checkpoints stay, and that the others are removed: for managers, promoters and `dcp prune`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from dcp_io import CheckpointRecord, KeepBest, KeepEvery, KeepLast, KeepPolicy, LocalStore
from dcp_io.roots.catalogue import Catalogue
from dcp_io.roots.records import Note
from dcp_manifest import CheckpointIndex
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import ManifestInfo

RECORDS = [
    CheckpointRecord(10, 100.0, {"loss": 1.0}),
    CheckpointRecord(20, 200.0, {"loss": 2.0}),
    CheckpointRecord(30, 300.0, {"loss": 3.0}),
    CheckpointRecord(40, 400.0, {"loss": 4.0}, quarantined="a bit flipped"),
]


@pytest.mark.parametrize(
    ("policy", "protected", "unfit", "stay"),
    [
        (KeepLast(1), (), (), {30, 40}),  # the damaged one stays as long as a good one would
        (KeepLast(1), (), (30,), {20, 30, 40}),
        (KeepLast(2), (10,), (), {10, 20, 30, 40}),
        (KeepLast(9), (), (30, 20), {10, 20, 30, 40}),
        (KeepBest(1, "loss"), (), (), {10}),
        (KeepBest(1, "loss"), (), (10,), {10, 20}),
        (KeepEvery(20), (), (20,), {20, 40}),  # not examined: no older one stays in its place
        (KeepBest(1, "loss") | KeepLast(1), (), (10, 30), {10, 20, 30, 40}),
    ],
)
def test_select_counts_fit_checkpoints(
    policy: KeepPolicy, protected: tuple[int, ...], unfit: tuple[int, ...], stay: set[int]
) -> None:
    assert policy.select(RECORDS, protected, lambda step: step not in unfit) == stay
    assert policy.select(RECORDS[::-1], protected, lambda step: step not in unfit) == stay
    assert policy.select([], protected, lambda step: True) == {*protected}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Catalogue]:
    def made(*steps: int) -> Catalogue:
        for place, step in enumerate(steps):
            folder = tmp_path / f"step-{step}"
            folder.mkdir()
            (folder / ".metadata").write_bytes(encode(CheckpointIndex(info=ManifestInfo(f"save-{step}", 1, "test"))))
            (folder / ".dcp-note.json").write_bytes(Note(step, 1.0 + place, {}, None).to_bytes())
        return Catalogue(LocalStore(tmp_path), stale_after_seconds=60)

    return made


def test_retain_removes_what_nothing_keeps(make: Callable[..., Catalogue]) -> None:
    catalogue = make(10, 20, 30, 25)
    asked: list[list[int]] = []

    def protected(folders: object) -> set[int]:
        asked.append([folder.step for folder in folders])  # type: ignore[attr-defined]
        return {10}

    removed, left = catalogue.retain(KeepLast(1), arrived=25, protected=protected)
    assert asked == [[10, 20, 25, 30]]
    assert removed == [20, 30]
    assert left is not None
    assert [folder.step for folder in left] == [10, 25] == [folder.step for folder in catalogue.folders()]


def test_retain_spares_higher_steps_if_asked(make: Callable[..., Catalogue]) -> None:
    catalogue = make(10, 20, 30, 25)
    removed, _ = catalogue.retain(KeepLast(1), arrived=25, spares_higher=True, protected=lambda _: ())
    assert removed == [10, 20]


def test_retain_removes_nothing_without_an_undamaged_checkpoint(make: Callable[..., Catalogue]) -> None:
    catalogue = make(10, 20)
    for step in (10, 20):
        catalogue.quarantine(step, "a bit flipped")
    removed, left = catalogue.retain(KeepLast(1), protected=lambda _: ())
    assert removed == []
    assert left is not None
    assert len(left) == 2


def test_retain_goes_on_after_a_removal_that_fails(
    make: Callable[..., Catalogue], caplog: pytest.LogCaptureFixture
) -> None:
    catalogue = make(10, 20, 30)
    real = catalogue.remove

    def remove(step: int) -> bool:
        if step == 10:
            raise OSError("the disk is away")
        return real(step)

    with mock.patch.object(catalogue, "remove", remove):
        removed, _ = catalogue.retain(KeepLast(1), protected=lambda _: ())
    assert removed == [20]
    assert "step 10 could not be removed" in caplog.text
