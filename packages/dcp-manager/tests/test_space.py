"""Space before training: what `preflight` finds, refuses and leaves behind, and which options a manager accepts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcp_io import KeepBest, LocalStore, StorageError, Store
from dcp_manager import (
    CheckpointManager,
    EverySeconds,
    EverySteps,
    KeepAll,
    KeepEvery,
    KeepFor,
    KeepLast,
    KeepPolicy,
    OnRequest,
    SavePolicy,
    preflight,
)
from dcp_manager.space import Spacing

STATE = {"weight": torch.zeros(100_000), "step": 0}


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what the file system says is free."""

    def free(blocks: int, files: int = 10_000) -> None:
        facts = SimpleNamespace(f_bavail=blocks, f_frsize=4096, f_blocks=1 << 30, f_favail=files, f_files=1 << 20)
        monkeypatch.setattr(os, "statvfs", lambda _: facts)

    return free


def blocks(root: Path) -> int:
    """How many blocks a checkpoint takes at most: the last one of each file is not full."""
    found = preflight(STATE, root)
    return -(-found.bytes_per_save // 4096) + found.files_per_save


@pytest.mark.parametrize(
    ("policy", "spacing"),
    [
        (EverySteps(10), Spacing(10, 10)),
        (EverySteps(10, first=11) | EverySteps(30), Spacing(10, 20)),
        (EverySteps(10, first=0) | EverySeconds(60), Spacing(10, 10, 60)),
        (EverySeconds(60) | EverySeconds(90), Spacing(None, 0, 60)),
        (OnRequest(), Spacing()),
    ],
    ids=repr,
)
def test_spacing_of_policies(policy: SavePolicy, spacing: Spacing) -> None:
    assert Spacing.of(policy) == spacing


@pytest.mark.parametrize(
    ("keep", "saves"),
    [
        (KeepAll(), 10),
        (KeepLast(9), None),
        (KeepLast(10), 10),
        # At save 18 of the numbers 0 to 17 (steps 10 to 180), steps 20, 40 … 160 stay, and 170 and 180.
        (KeepEvery(20) | KeepLast(2), 18),
        (KeepBest(6, "loss") | KeepLast(3), None),
        (KeepBest(7, "loss") | KeepLast(3), 10),
        (KeepBest(7, "accuracy", mode="max") | KeepLast(3), 10),
    ],
    ids=repr,
)
def test_space_ends_when_the_policy_holds_more(
    tmp_path: Path, free: Callable[..., None], keep: KeepPolicy, saves: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    free(10 * blocks(tmp_path))
    with caplog.at_level(logging.WARNING):
        found = preflight(STATE, tmp_path, save_policy=EverySteps(10), keep_policy=keep)
    full_at = None if saves is None else 10 * (saves + 1)
    assert (found.saves, found.full_at_step) == (saves, full_at)
    assert (f"ends at step {full_at}" in caplog.text) == (saves is not None)
    assert preflight(STATE, tmp_path, save_policy=EverySteps(10), keep_policy=keep, steps=50).saves is None
    assert preflight(STATE, tmp_path, keep_policy=keep).full_at_step is None
    assert [*tmp_path.iterdir()] == []


def test_time_frees_what_is_kept_for_a_time(tmp_path: Path, free: Callable[..., None]) -> None:
    free(10 * blocks(tmp_path))
    for seconds, saves in ((60, 10), (90, None)):
        found = preflight(STATE, tmp_path, save_policy=EverySeconds(seconds), keep_policy=KeepFor(600))
        assert found.saves == saves, seconds


TRAINED = {"app": {"model": torch.zeros(100_000), "optimizer": [torch.zeros(100_000), torch.zeros(100_000)]}, "step": 0}


@pytest.mark.parametrize(
    ("parts", "saves"),
    [
        (["app.model"], 24),  # room of 7 is left for smaller ones of a third each, and 3 are whole
        (["app"], 10),
        (["app.model", "app.modle"], 10),  # stays whole: one is unknown
    ],
)
def test_smaller_checkpoints_count_as_smaller(
    tmp_path: Path, free: Callable[..., None], parts: list[str], saves: int
) -> None:
    found = preflight(TRAINED, tmp_path)
    free(10 * (-(-found.bytes_per_save // 4096) + found.files_per_save))
    keep = KeepLast(2) | KeepEvery(10, parts=parts)
    predicted = preflight(TRAINED, tmp_path, save_policy=EverySteps(10), keep_policy=keep).saves
    assert predicted is not None
    assert abs(predicted - saves) <= 1, predicted


def test_existing_checkpoints_count(tmp_path: Path, free: Callable[..., None]) -> None:
    with CheckpointManager(tmp_path, keep_policy=KeepLast(3)) as manager:
        for step in (10, 20, 30):
            manager.save(step, STATE)
    free(2 * blocks(tmp_path))
    found = preflight(STATE, tmp_path, save_policy=EverySteps(10), keep_policy=KeepLast(3))
    assert found.saves is None
    assert preflight(STATE, tmp_path, save_policy=EverySteps(10), keep_policy=KeepLast(5)).full_at_step == 60


def test_inodes_end_before_bytes(tmp_path: Path, free: Callable[..., None]) -> None:
    free(1 << 30, files=9)
    found = preflight(STATE, tmp_path, save_policy=EverySteps(10), keep_policy=KeepAll())
    assert (found.files_per_save, found.full_at_step) == (2, 40)  # and a note in each checkpoint


def test_no_room_for_the_first(tmp_path: Path, free: Callable[..., None]) -> None:
    free(10)
    with pytest.raises(StorageError, match=r"has room for 40,960 bytes, and one checkpoint needs 40\d,\d\d\d"):
        preflight(STATE, tmp_path)
    free(1 << 20, files=1)
    with pytest.raises(StorageError, match="has room for 1 files"):
        preflight(STATE, tmp_path)


@pytest.mark.parametrize(
    ("method", "doing"),
    [
        ("make", "create a directory"),
        ("create", "create a file"),
        ("publish", "replace a file"),
        ("sync_folder", "replace a file"),
        ("read", "read a file"),
        ("delete", "remove a file"),
    ],
)
def test_what_the_storage_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, doing: str) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalStore, method, refuse)
    with pytest.raises(StorageError, match=f"not possible to {doing} there.*Permission denied"):
        preflight(STATE, tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_storage_that_returns_old_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(self: Store, name: str, data: bytes, **_: Any) -> None:
        """Succeed and change nothing."""

    monkeypatch.setattr(LocalStore, "publish", publish)
    with pytest.raises(StorageError, match="read with other bytes"):
        preflight(STATE, tmp_path)


@pytest.mark.parametrize("kind", ["tmpfs", "overlay"])
def test_places_that_do_not_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("dcp_io.stores.local_store.file_system_of", lambda _: kind)
    (warning,) = preflight(STATE, tmp_path).warnings
    assert f"({kind})" in warning


def test_policies_for_a_full_disk_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_full is 'wait'; choose 'fail', 'pause' or 'drop_oldest'"):
        CheckpointManager(tmp_path, on_full="wait")  # type: ignore[arg-type]


@pytest.mark.parametrize("root", ["host:///nvme/run", "keeper://run", "s3://bucket/run", "memory://run"])
@pytest.mark.parametrize("on_full", ["pause", "drop_oldest"])
def test_a_policy_for_a_full_disk_needs_a_directory(root: str, on_full: Any) -> None:
    with pytest.raises(ValueError, match="only a directory has free space that is known"):
        CheckpointManager(root, on_full=on_full)
