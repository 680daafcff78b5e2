"""Every deletion × every kind of damage of what would be kept: the newest sound checkpoints that were there stay.

A table: what deletes checkpoints, and what is wrong with the newest ones when it runs. After each, the newest sound
checkpoint that existed before, or was just published, can still be loaded, and every byte of it matches. At least as
many sound ones are left as the deletion should keep. Files that no save of the run has made stay as they were.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed.checkpoint as stock

import dcp_all
from dcp_base import DcpError
from dcp_inspect import run as dcp
from dcp_io import KeepBest, KeepLast, LocalStore, StorageError, Store, verify_checkpoint
from dcp_io.roots.catalogue import Catalogue
from dcp_io.saves.save_files import this_process
from dcp_manager import CheckpointManager
from dcp_manager.space import _Free
from dcp_tiers import Tier, Tiers
from dcp_tiers.promote import promote
from dcp_tiers.removal import make_room
from integration_tests.kits.damage import flip
from integration_tests.kits.permissions import modes_count
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


def index_of(step: Path) -> Path:
    return step / ".metadata"


def note_of(step: Path) -> Path:
    return step / ".dcp-note.json"


def noted(**fields: object) -> Break:
    """Let the note say something else."""
    return lambda step: note_of(step).write_text(json.dumps({**json.loads(note_of(step).read_text()), **fields}))


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def instead(which: Callable[[Path], Path], make: Callable[[Path], object]) -> Break:
    """Put something else in the place of a file or of the directory of the step."""

    def change(step: Path) -> None:
        path = which(step)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        make(path)

    return change


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def a_link(which: Callable[[Path], Path]) -> Break:
    """Move a file or the directory out of the run, and leave a link."""

    def change(step: Path) -> None:
        path = which(step)
        away = step.parent.parent / "mine" / f"{step.name}-{path.name}"
        away.parent.mkdir(exist_ok=True)
        shutil.move(path, away)
        path.symlink_to(away)

    return change


def of_stock(step: Path) -> None:
    """Let PyTorch save the step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save(state(int(step.name.removeprefix("step-"))), checkpoint_id=step, no_dist=True)


def begun_by_stock(step: Path) -> None:
    """Leave what a save of PyTorch that runs has written: its file, and neither marker nor index."""
    of_stock(step)
    index_of(step).unlink()


def step_of(step: Path) -> Path:
    return step


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
    "no index": lambda step: index_of(step).unlink(),
    "an empty index": lambda step: os.truncate(index_of(step), 0),
    "an index of random bytes": lambda step: garbage(index_of(step)),
    "an index with a flipped byte": lambda step: flip(index_of(step), -9),
    "a longer index": lambda step: longer(index_of(step)),
    "the index of another step": lambda step: shutil.copy(index_of(step.parent / "step-1"), index_of(step)),
    "the data of another step": lambda step: shutil.copy(data_of(step.parent / "step-1"), data_of(step)),
    "data of zeros": lambda step: zeros(data_of(step)),
    "a note of random bytes": lambda step: garbage(note_of(step)),
    "no note": lambda step: note_of(step).unlink(),
    "a note of mode 0": lambda step: note_of(step).chmod(0),
    "a note with other types": noted(step="x", created="x", metrics=[], keeps_best=1),
    "a note of the future": noted(step=999, created=4e9),
    "a quarantine of random bytes": lambda step: (step / ".dcp-quarantined.json").write_bytes(b"\xff"),
    "being removed": lambda step: (step / ".dcp-removing").touch(),
    "a linked directory": a_link(step_of),
    "a dangling link": instead(step_of, lambda path: path.symlink_to("nowhere")),
    "a linked data file": a_link(data_of),
    "a linked index": a_link(index_of),
    "a directory instead of data": instead(data_of, a_folder),
    "a directory instead of the index": instead(index_of, a_folder),
    "a pipe instead of data": instead(data_of, os.mkfifo),
    "a directory of somebody": instead(step_of, a_folder),
    "a file of somebody": instead(step_of, lambda path: path.write_text("mine")),
    "saved by PyTorch": instead(step_of, of_stock),
    "saved by PyTorch, damaged": instead(step_of, lambda path: (of_stock(path), half(data_of(path)))),
    "being saved by PyTorch": instead(step_of, begun_by_stock),
}
# Kinds after which the newest checkpoint is still sound.
_OF_NOTES = {f"a note {kind}" for kind in ("of random bytes", "of mode 0", "with other types", "of the future")}
WHOLE = {"nothing", "made before the others", "no note", *_OF_NOTES, "a linked directory", "saved by PyTorch"}
# Reading all bytes at each save would cost as much as the save: these see what index and sizes show.
UNSEEN_BY_RETENTION = {"a flipped byte", "data of mode 0", "data of zeros", "the data of another step"}


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


def prune_of_two(root: Path) -> None:
    dcp(["prune", str(root), "--keep", "2", "--yes"])


def prune_of_a_part(root: Path) -> None:
    dcp(["prune", str(root), "--keep", "1", "--keep-part", "weight", "--yes"])


def remove_a_part(root: Path) -> None:
    dcp(["rm", str(root / f"step-{LAST}"), "--part", "step", "--yes"])


def link_equal_files(root: Path) -> None:
    dcp(["dedupe", str(root), "--yes"])


def drop_oldest(root: Path) -> None:
    room, indexes = _Free.of(LocalStore(root)), len([*root.glob("step-*/.metadata")])

    def free(_: Store) -> _Free:
        """Room for the save after two are gone."""
        return replace(room, bytes=0 if len([*root.glob("step-*/.metadata")]) > indexes - 2 else 1 << 40)

    with mock.patch.object(_Free, "of", free), contextlib.suppress(StorageError):
        save(root, LAST + 1, 0.9, on_full="drop_oldest")


def save_over(root: Path) -> None:
    with contextlib.suppress(OSError, DcpError):
        dcp_all.save(state(LAST), checkpoint_id=root / f"step-{LAST}", no_dist=True)


def remove_and_save_again(root: Path) -> None:
    save(root, 1, 0.9, keep_policy=KeepLast(1), lower_steps="allow")


# Deletion → how many sound checkpoints it leaves at least, if there were as many.
DELETIONS: dict[str, tuple[Callable[[Path], None], int]] = {
    "prune": (prune, 1),
    "prune of two": (prune_of_two, 2),
    "prune --force": (prune_unforced_of_two, 2),
    "prune --keep-part": (prune_of_a_part, LAST),
    "rm": (remove_the_oldest, LAST - 3),
    "rm --part": (remove_a_part, LAST),
    "dedupe": (link_equal_files, LAST),
    "KeepLast": (keep_last, 1),
    "KeepBest": (keep_best, 1),
    "a save that fails": (failed_save, 1),
    "sweep": (sweep, LAST),
    "a budget": (a_budget, 1),
    "drop_oldest": (drop_oldest, 1),
    "a lower step": (remove_and_save_again, 1),
    "a save over the last": (save_over, LAST - 1),
}
# Step that a deletion publishes before it removes anything.
PUBLISHES = {"KeepLast": LAST + 1, "KeepBest": LAST + 1, "a lower step": 1}


def sound_steps(root: Path) -> list[int]:
    """The steps whose every byte matches, ascending; those of mode 0 are not among them."""
    found = []
    for path in root.glob("step-*"):
        with modes_count(), contextlib.suppress(OSError, DcpError):
            marks = (path / ".dcp-quarantined.json", path / ".dcp-removing")
            if not any(mark.exists() for mark in marks) and verify_checkpoint(path).ok:
                found.append(int(path.name.removeprefix("step-")))
    return sorted(found)


def of_somebody(root: Path) -> dict[str, object]:
    """What no save of the run has made: files and directories of somebody, and targets of links."""
    mine = [path for path in root.parent.rglob("*mine*/**/*") if not path.name.startswith(".dcp-reading")]
    mine += [path for path in root.rglob("*") if path.name == "mine.txt" or path.name == "__0_0.distcp"]
    mine += [path for path in root.glob("step-*") if path.is_file()]
    return {str(path): path.is_dir() or path.read_bytes() for path in mine}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of several steps; tests copy it."""
    root = tmp_path_factory.mktemp("saved") / "run"
    with CheckpointManager(root) as manager:
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
def test_the_newest_sound_checkpoints_stay(root: Path, deletion: str, damage: str) -> None:
    for step in (LAST - 1, LAST):
        DAMAGE[damage](root / f"step-{step}")
    before, mine = sound_steps(root), of_somebody(root)
    assert before[-1] == (LAST if damage in WHOLE else LAST - 2)
    delete, keep = DELETIONS[deletion]
    with modes_count():
        delete(root)
    after = sound_steps(root)
    assert before[-1] in after or PUBLISHES.get(deletion) in after
    assert len(after) >= min(keep, len(before))
    follows_links = deletion in ("a save over the last", "rm --part") and damage == "a linked directory"
    if not (follows_links or damage.startswith("saved by PyTorch")):
        assert of_somebody(root) == mine


@pytest.mark.parametrize("deletion", DELETIONS)
def test_a_step_to_which_a_link_points_stays(root: Path, deletion: str) -> None:
    """A save of the same step replaces it, and the link names the new one."""
    (root / "best").symlink_to("step-1")
    index = index_of(root / "step-1").read_bytes()
    DELETIONS[deletion][0](root)
    assert 1 in sound_steps(root)
    assert deletion == "a lower step" or index_of(root / "step-1").read_bytes() == index


@pytest.mark.parametrize("deletion", ["prune", "KeepLast", "drop_oldest", "a budget"])
def test_deletions_delete(root: Path, deletion: str) -> None:
    """Or the table above would show nothing."""
    DELETIONS[deletion][0](root)
    assert len(sound_steps(root)) < LAST


@pytest.mark.parametrize("damage", sorted(DAMAGE.keys() - UNSEEN_BY_RETENTION - {"being saved"}))
def test_retention_keeps_another_for_what_is_incomplete(root: Path, damage: str) -> None:
    """`KeepLast(2)` leaves two that can be loaded, however many of the newest are damaged."""
    for step in (LAST - 1, LAST):
        DAMAGE[damage](root / f"step-{step}")
    before = sound_steps(root)
    with modes_count():
        save(root, LAST + 1, 0.9, keep_policy=KeepLast(2))
    assert len(sound_steps(root)) >= 2
    assert LAST + 1 in sound_steps(root)
    assert max(before) in sound_steps(root) or damage == "made before the others"


IN_A_TIER = ("nothing", "a flipped byte", "a cut file", "a missing file", "a damaged index", "an index of mode 0")
IN_A_TIER += ("a folder of mode 0", "quarantined", "made before the others", "a linked directory", "no note")
IN_A_TIER += ("a note of the future", "saved by PyTorch", "a directory instead of data", "a directory of somebody")


@pytest.mark.parametrize("damage", IN_A_TIER)
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


def with_metrics(root: Path) -> set[int]:
    """Steps that a tier sees, and whose notes have a metric."""
    records = Catalogue(LocalStore(root), stale_after_seconds=60).records()
    return {record.step for record in records if "loss" in record.metrics}


# The promotion of an index that may not be read is tried again: somebody may allow it.
BEST_IN_A_TIER = [
    (damaged, damage)
    for damaged, damage in itertools.product(("near", "far"), IN_A_TIER)
    if (damaged, damage) != ("near", "an index of mode 0")
]


@pytest.mark.parametrize(("damaged", "damage"), BEST_IN_A_TIER)
def test_a_tier_keeps_another_for_a_best_one_that_is_damaged(
    tmp_path: Path, root: Path, damaged: str, damage: str
) -> None:
    near, far = (root, tmp_path / "far") if damaged == "near" else (tmp_path / "near", root)
    DAMAGE[damage](root / f"step-{LAST}")
    before = sound_steps(root)
    best = max(with_metrics(root) & {*before})  # the losses fall from step to step
    with modes_count():
        tiers = Tiers([Tier(str(near), keep=KeepBest(1, "loss")), Tier(str(far), keep=KeepBest(1, "loss"))])
        save(near, LAST + 1, 0.9)
        promote(tiers)
    after = sound_steps(root)
    assert LAST + 1 in after
    if damage not in UNSEEN_BY_RETENTION:
        assert best in after
    if damaged == "near":
        assert best in sound_steps(far)


def test_a_run_goes_on_after_prune(root: Path) -> None:
    flip(data_of(root / f"step-{LAST}"), 20_000)
    prune(root)
    assert restored(root) == LAST - 1
