"""A disk that fills: the step that `preflight` predicts, and what `on_full` makes of it."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import dcp_all as dcp
from dcp_core import CheckpointException
from dcp_io import KeepBest, KeepPolicy, StorageError
from dcp_manager import CheckpointManager, EverySteps, KeepAll, KeepEvery, KeepLast, preflight, space
from dcp_manager.space import _Free
from integration_tests.robustness.small_disk import mounted

VALUES = 50_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, which holds about 20 checkpoints of one rank."""
    with mounted(tmp_path / "disk", "4m") as place:
        yield place


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((VALUES,), float(step)), "step": step}


@pytest.mark.parametrize(
    "keep",
    [KeepAll(), KeepEvery(30) | KeepLast(2), KeepLast(40), KeepLast(3), KeepBest(4, "loss") | KeepLast(3)],
    ids=repr,
)
def test_the_predicted_step_is_the_one_that_fails(small_disk: Path, keep: KeepPolicy) -> None:
    root, every = small_disk / "run", EverySteps(10)
    found = preflight(state(0), root, save_policy=every, keep_policy=keep)
    failed = None
    manager = CheckpointManager(root, save_policy=every, keep_policy=keep)
    for step in range(10, 1000, 10):
        try:
            manager.maybe_save(step, state(step), metrics={"loss": float(step)})
        except OSError:
            failed = step
            break
    if failed is None:
        assert found.full_at_step is None
    else:
        assert found.full_at_step is not None
        assert abs(found.full_at_step - failed) <= 10, found


def test_the_first_save_tells_when_space_ends(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager(small_disk / "run", save_policy=EverySteps(10), keep_policy=KeepAll())
    with caplog.at_level(logging.WARNING):
        manager.maybe_save(10, state(10))
        manager.maybe_save(20, state(20))
    predicted = preflight(state(0), small_disk / "run", save_policy=EverySteps(10)).full_at_step
    (said,) = [record.message for record in caplog.records if record.name == "dcp_manager.space"][:1]
    assert said.startswith(f"space for checkpoints ends at step {predicted}:")
    assert caplog.text.count("space for checkpoints ends") == 2  # by the first save, and by the `preflight` here


def test_the_predicted_step_counts_smaller_checkpoints(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two thirds of each old checkpoint go: the run gets more than twice as far as with whole ones."""
    values = {name: torch.zeros(VALUES // 3) for name in ("weight", "m", "v")}
    keep = KeepLast(1) | KeepEvery(10, parts=["weight"])
    root, every = small_disk / "run", EverySteps(10)
    found = preflight(values, root, save_policy=every, keep_policy=keep)
    whole = preflight(values, root, save_policy=every).full_at_step
    manager, failed = CheckpointManager(root, save_policy=every, keep_policy=keep), 0
    with caplog.at_level(logging.WARNING):
        for step in range(10, 1000, 10):
            try:
                manager.maybe_save(step, values)
            except OSError:
                failed = step
                break
    assert found.full_at_step is not None
    assert whole is not None
    assert abs(found.full_at_step - failed) <= 10, (found, failed)
    assert found.full_at_step > 2 * whole
    (said,) = re.findall(r"space for checkpoints ends at step (\d+)", caplog.text)[-1:]
    assert abs(int(said) - failed) <= 10


def saved(root: Path | str) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in Path(root).glob("step-*"))


def fill(root: str, on_full: Any, last: int, saver: str | None) -> list[int]:
    """Save many steps; returns those that stay."""
    used = None if saver is None else dcp.AsyncSaver(saver)
    with CheckpointManager(root, save_policy=EverySteps(10), on_full=on_full, saver=used) as manager:
        for step in range(10, last + 1, 10):
            manager.maybe_save(step, state(step))
            manager.wait()
    if used is not None:
        used.close()
    return saved(root)


@pytest.mark.parametrize("saver", [None, "thread"])
def test_the_oldest_go(ranks: Any, small_disk: Path, saver: str | None) -> None:
    found = ranks.run(2, fill, str(small_disk / "run"), "drop_oldest", 400, saver)
    assert found[0] == found[1]
    assert 5 < len(found[0]) < 25
    assert found[0] == [*range(400 - 10 * (len(found[0]) - 1), 401, 10)]


def linking(path: Any) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(path, deduplicate=True)


def used(root: Path) -> int:
    facts = [file.stat() for file in root.glob("step-*/*")]
    return sum({one.st_ino: one.st_size for one in facts}.values())


@pytest.mark.parametrize("linked", [True, False])
def test_nothing_is_removed_that_would_not_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    """Old checkpoints whose files others have free nothing; others free too little, where somebody fills the disk."""
    with CheckpointManager(tmp_path, writer=linking) as manager:
        for step in range(1, 5):
            manager.save(step, {"weight": state(0 if linked else step)["weight"], "step": step})
    held = used(tmp_path)
    monkeypatch.setattr(_Free, "of", lambda _: _Free(bytes=0 if linked else VALUES * 4 - held))
    with (
        CheckpointManager(tmp_path, on_full="drop_oldest") as manager,
        pytest.raises(StorageError, match="no older checkpoint can be removed that would free enough"),
    ):
        manager.save(5, state(0))
    assert saved(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("on_full", ["pause", "drop_oldest"])
def test_a_save_that_links_most_files_needs_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_full: Any
) -> None:
    """The disk has room for half a checkpoint, and later for a tenth, while a save has a hundredth of its bytes."""
    monkeypatch.setattr(_Free, "of", lambda _: _Free(bytes=room - used(tmp_path)))
    room = 1 << 30
    with CheckpointManager(tmp_path, on_full=on_full, writer=linking, timeout_seconds=2) as manager:
        manager.save(1, state(0))
        manager.save(2, state(0))
        own = used(tmp_path) - VALUES * 4
        room = VALUES * 6
        for step in (3, 4):
            manager.save(step, state(0))
        assert own < VALUES * 4 // 10
        assert saved(tmp_path) == [1, 2, 3, 4]
        if on_full == "drop_oldest":
            room = used(tmp_path)
            manager.save(5, state(0))
            assert saved(tmp_path)[-3:] == [3, 4, 5]


def test_a_save_that_links_less_than_the_last_one_is_made_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt finds the disk full, because the save before it linked all; the second one is counted whole."""
    room = 1 << 30
    monkeypatch.setattr(_Free, "of", lambda _: _Free(bytes=room - used(tmp_path)))
    with CheckpointManager(tmp_path, on_full="drop_oldest", writer=linking) as manager:
        for step, values in ((1, 1), (2, 2), (3, 3), (4, 3)):
            manager.save(step, state(values))
        room = used(tmp_path) + VALUES * 2
        full = mock.patch("dcp_manager.manager.save", side_effect=OSError(errno.ENOSPC, "no space left on device"))
        with full, pytest.raises(OSError, match="no space left"):
            manager.save(5, state(5))
        assert saved(tmp_path) == [1, 2, 3, 4]
        manager.save(6, state(6))
    assert saved(tmp_path) == [2, 3, 4, 6]


def test_room_is_found_while_others_remove_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Between a listing and the sizes of its files, a note gets its final name, and the newest checkpoint goes away."""
    looks = [0, 0, 0, 1 << 30]

    def free(_: object) -> _Free:
        newest = tmp_path / f"step-{len(looks)}"
        if newest.exists():
            newest.rename(tmp_path / f"gone-{len(looks)}")
        return _Free(bytes=looks.pop(0))

    def scandir(path: Any) -> Any:
        note = Path(path) / "note.tmp"
        note.touch()
        found = [*os.scandir(path)]
        note.unlink()
        return found

    with CheckpointManager(tmp_path, on_full="pause", writer=linking, timeout_seconds=2) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state(step))
        monkeypatch.setattr(_Free, "of", free)
        monkeypatch.setattr(space, "os", SimpleNamespace(**{**vars(os), "scandir": scandir}))
        manager.save(5, state(5))
    assert "training waits for" in caplog.text
    assert saved(tmp_path) == [5]


def test_a_compressing_save_needs_what_the_last_one_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 1 << 30
    monkeypatch.setattr(_Free, "of", lambda _: _Free(bytes=room))
    with CheckpointManager(
        tmp_path, on_full="drop_oldest", writer=lambda path: dcp.FileSystemWriter(path, compression="zstd")
    ) as manager:
        manager.save(1, state(0))
        room = VALUES * 2
        manager.save(2, state(0))
    assert saved(tmp_path) == [1, 2]


@pytest.mark.parametrize("saver", [None, "thread"])
def test_training_waits_until_there_is_room(ranks: Any, small_disk: Path, saver: str | None) -> None:
    """Somebody removes a file of another run when the disk is full."""
    other = small_disk / "other"
    other.write_bytes(bytes(3 << 20))
    started = time.monotonic()
    timer = threading.Timer(4.0, other.unlink)
    timer.start()
    found = ranks.run(2, fill, str(small_disk / "run"), "pause", 80, saver)
    timer.join()
    assert time.monotonic() - started > 4
    assert found == [[*range(10, 81, 10)]] * 2


def overfill(root: str) -> str:
    """A state that is larger than the disk."""
    with pytest.raises(CheckpointException) as raised, CheckpointManager(root, on_full="drop_oldest") as manager:
        manager.save(1, {"weight": torch.zeros(2 << 20)})
    causes = [cause for cause, _ in raised.value.failures.values()]
    assert all(cause is None or isinstance(cause, StorageError) for cause in causes)
    return str(raised.value)


def test_what_never_fits_is_refused_on_all_ranks(ranks: Any, small_disk: Path) -> None:
    for text in ranks.run(2, overfill, str(small_disk / "run")):
        assert "no older checkpoint can be removed" in text


def test_the_newest_complete_one_is_never_dropped(small_disk: Path) -> None:
    """Also if the disk has room for one checkpoint only, and none for a second."""
    root = small_disk / "run"
    manager = CheckpointManager(root, on_full="drop_oldest")
    manager.save(1, state(1))
    (small_disk / "other").write_bytes(bytes((4 << 20) - 350_000))
    with pytest.raises(StorageError, match="is full"):
        manager.save(2, state(2))
    assert saved(root) == [1]
    template = state(0)
    dcp.load(template, checkpoint_id=str(root / "step-1"))
    assert template["step"] == 1
