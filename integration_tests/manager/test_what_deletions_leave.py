"""Every deletion × every kind of damage of what would be kept: the newest sound checkpoint that was there stays.

A table: what deletes checkpoints, and what is wrong with the newest ones when it runs. After each, the newest sound
checkpoint that existed before, or was just published, can still be loaded, and every byte of it matches.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dcp_inspect import run as dcp
from dcp_io import KeepBest, KeepLast, LocalStore, verify_checkpoint
from dcp_io.roots.catalogue import Catalogue
from dcp_io.saves.save_files import this_process
from dcp_io.testing.damage import flip
from dcp_io.testing.permissions import modes_count
from dcp_manager import CheckpointManager
from dcp_tiers import Tier, Tiers
from dcp_tiers.promote import promote
from dcp_tiers.removal import make_room
from integration_tests.manager.checkpoints import restored, state

Break = Callable[[Path], object]
LAST = 5


def data_of(step: Path) -> Path:
    return next(step.glob("*.distcp"))


def saving(step: Path) -> None:
    """Leave the marker of a save that runs, and no index."""
    (step / ".metadata").unlink()
    marker = {"save_id": "0123456789abcdef", "rank": None, "phase": "saving", "started_ns": 1, "replaced": []}
    (step / ".dcp-save-0123456789abcdef").write_text(json.dumps({**marker, "process": this_process().to_dict()}))


def went_back(step: Path) -> None:
    """Let the note say that the step was made long before the others."""
    note = json.loads((step / ".dcp-note.json").read_text())
    (step / ".dcp-note.json").write_text(json.dumps({**note, "created": 1.0}))


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[str, Break] = {
    "nothing": lambda step: None,
    "a flipped byte": lambda step: flip(data_of(step), 20_000),
    "a cut file": lambda step: half(data_of(step)),
    "an empty file": lambda step: os.truncate(data_of(step), 0),
    "a missing file": lambda step: data_of(step).unlink(),
    "a damaged index": lambda step: half(step / ".metadata"),
    "an index of mode 0": lambda step: (step / ".metadata").chmod(0),
    "data of mode 0": lambda step: data_of(step).chmod(0),
    "a folder of mode 0": lambda step: step.chmod(0),
    "quarantined": lambda step: (step / ".dcp-quarantined.json").write_text('{"reason": "it was NaN"}'),
    "being saved": saving,
    "made before the others": went_back,
}
WHOLE = {"nothing", "made before the others"}
# Reading all bytes at each save would cost as much as the save: these see what index and sizes show.
UNSEEN_BY_RETENTION = {"a flipped byte", "data of mode 0"}


def save(root: Path, step: int, loss: float, **options: object) -> None:
    """Save a step as a process does that has not seen the others."""
    with CheckpointManager(root, **options) as manager:  # type: ignore[arg-type]
        manager.save(step, state(step), metrics={"loss": loss})


def prune(root: Path) -> None:
    dcp(["prune", str(root), "--keep", "1", "--yes"])


def prune_unforced_of_two(root: Path) -> None:
    dcp(["prune", str(root), "--keep", "2", "--yes", "--force"])


def remove_the_oldest(root: Path) -> None:
    dcp(["rm", str(root / "step-1"), "--yes"])


def keep_last(root: Path) -> None:
    save(root, LAST + 1, 0.9, keep_policy=KeepLast(1))


def keep_best(root: Path) -> None:
    save(root, LAST + 1, 0.9, keep_policy=KeepBest(1, "loss"))


def failed_save(root: Path) -> None:
    with CheckpointManager(root, keep_policy=KeepLast(1)) as manager, contextlib.suppress(Exception):
        manager.save(LAST + 1, {"bad": open})


def sweep(root: Path) -> None:
    Catalogue(LocalStore(root), stale_after_seconds=60).sweep()


def a_budget(root: Path) -> None:
    tiers = Tiers([Tier(str(root), max_bytes=60_000, when_full="drop")])
    make_room(tiers, 0, LAST + 1)


def remove_and_save_again(root: Path) -> None:
    save(root, 1, 0.9, keep_policy=KeepLast(1), lower_steps="allow")


DELETIONS = {
    "prune": prune,
    "prune --force": prune_unforced_of_two,
    "rm": remove_the_oldest,
    "KeepLast": keep_last,
    "KeepBest": keep_best,
    "a save that fails": failed_save,
    "sweep": sweep,
    "a budget": a_budget,
    "a lower step": remove_and_save_again,
}
# Step that a deletion publishes before it removes anything.
PUBLISHES = {"KeepLast": LAST + 1, "KeepBest": LAST + 1, "a lower step": 1}


def sound_steps(root: Path) -> list[int]:
    """The steps whose every byte matches, ascending; those of mode 0 are not among them."""
    found = []
    for path in root.glob("step-*"):
        with modes_count(), contextlib.suppress(OSError):
            if not (path / ".dcp-quarantined.json").exists() and verify_checkpoint(path).ok:
                found.append(int(path.name.removeprefix("step-")))
    return sorted(found)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of several steps; tests copy it."""
    root = tmp_path_factory.mktemp("saved") / "run"
    with CheckpointManager(root, keep_policy=KeepBest(9, "loss")) as manager:
        for step in range(1, LAST + 1):
            manager.save(step, state(step), metrics={"loss": 1 / step})
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy of the run, which no process of this host has read or written."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("deletion", DELETIONS)
@pytest.mark.parametrize("broken", [1, 2])
def test_the_newest_sound_checkpoint_stays(root: Path, deletion: str, damage: str, broken: int) -> None:
    for step in range(LAST + 1 - broken, LAST + 1):
        DAMAGE[damage](root / f"step-{step}")
    before = sound_steps(root)
    assert before[-1] == (LAST if damage in WHOLE else LAST - broken)
    with modes_count():
        DELETIONS[deletion](root)
    after = sound_steps(root)
    assert before[-1] in after or PUBLISHES.get(deletion) in after


@pytest.mark.parametrize("damage", sorted(DAMAGE.keys() - UNSEEN_BY_RETENTION - {"being saved"}))
def test_retention_keeps_another_for_what_is_incomplete(root: Path, damage: str) -> None:
    """`KeepLast(2)` leaves two that can be loaded, however many of the newest are damaged."""
    for step in (LAST, LAST - 1):
        DAMAGE[damage](root / f"step-{step}")
    before = sound_steps(root)
    with modes_count():
        save(root, LAST + 1, 0.9, keep_policy=KeepLast(2))
    assert len(sound_steps(root)) >= 2
    assert LAST + 1 in sound_steps(root)
    assert max(before) in sound_steps(root) or damage == "made before the others"


@pytest.mark.parametrize("damage", sorted(DAMAGE.keys() - {"being saved"}))
def test_a_tier_keeps_another_for_what_is_damaged(tmp_path: Path, root: Path, damage: str) -> None:
    near, far = tmp_path / "near", root
    DAMAGE[damage](far / f"step-{LAST}")
    before = sound_steps(far)
    save(near, LAST + 1, 0.5)
    with modes_count():
        promote(Tiers([Tier(str(near)), Tier(str(far), keep=KeepLast(2))]))
    after = sound_steps(far)
    assert after[-1] == LAST + 1
    if damage not in UNSEEN_BY_RETENTION:
        assert max(before) in after or damage == "made before the others"


def test_a_run_goes_on_after_prune(root: Path) -> None:
    flip(data_of(root / f"step-{LAST}"), 20_000)
    prune(root)
    assert restored(root) == LAST - 1
