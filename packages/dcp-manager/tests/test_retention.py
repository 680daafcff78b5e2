"""What is removed after a publish, and what stays whatever a policy says. No checkpoint is saved here."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_io import LocalStore
from dcp_manager import KeepEvery, KeepLast, KeepPolicy
from dcp_manager.catalogue import Catalogue
from dcp_manager.records import Note
from dcp_manager.retention import Retention


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
