"""Every deletion × every kind of damage, in places that each host has for itself: disks and keepers.

As in `test_what_deletions_leave`. Of a checkpoint on the disks of two hosts, the host that deletes sees its own files
only: what is damaged there is not kept for what is sound.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dcp_all
from dcp_base import DcpError
from dcp_core.hosts.host_storage import HostStorageWriter
from dcp_inspect import run as dcp
from dcp_io import KeepBest, KeepLast, LocalStore, Store, open_store, verify_checkpoint
from dcp_io.roots.catalogue import Catalogue
from dcp_io.stores.host_store import HostFolder
from dcp_io.stores.store import with_folders
from dcp_manager import CheckpointManager
from dcp_memory import stop_keeper
from dcp_tiers import Tier, Tiers
from dcp_tiers.removal import make_room
from integration_tests.hosts.pretended import NEAR, on_host, without_promoter
from integration_tests.manager.checkpoints import state

LAST = 5
KEEPER = "deletions"
PLACES = ("disks of two hosts", "keeper")
Break = Callable[[Store], object]


def data_of(store: Store) -> str:
    """The file of the weight, which the host that deletes has."""
    return max((entry for entry in store.list() if entry.name.endswith(".distcp")), key=lambda entry: entry.bytes).name


def changed(name: Callable[[Store], str], change: Callable[[bytes], bytes]) -> Break:
    def act(store: Store) -> None:
        which = name(store)
        store.publish(which, change(store.read(which)))

    return act


def named(name: str) -> Callable[[Store], str]:
    return lambda _: name


def flipped(data: bytes) -> bytes:
    return data[:20_000] + bytes([data[20_000] ^ 1]) + data[20_001:]


DAMAGE: dict[str, Break] = {
    "nothing": lambda store: None,
    "a flipped byte": changed(data_of, flipped),
    "a cut file": changed(data_of, lambda data: data[: len(data) // 2]),
    "an empty file": changed(data_of, lambda data: b""),
    "data of zeros": changed(data_of, lambda data: bytes(len(data))),
    "a damaged index": changed(named(".metadata"), lambda data: data[: len(data) // 2]),
    "an empty index": changed(named(".metadata"), lambda data: b""),
    "no index": lambda store: store.delete(".metadata"),
    "quarantined": lambda store: store.publish(".dcp-quarantined.json", b'{"reason": "it was NaN"}'),
    "being removed": lambda store: store.publish(".dcp-removing", b""),
    "a note of random bytes": changed(named(".dcp-note.json"), lambda data: b"\xff" * len(data)),
    "no note": lambda store: store.delete(".dcp-note.json"),
}
WHOLE = {"nothing", "a note of random bytes", "no note"}
# Reading all bytes at each save would cost as much as the save: these see what index and sizes show.
UNSEEN_BY_RETENTION = {"a flipped byte", "data of zeros"}


def save(root: str, step: int, loss: float, **options: Any) -> None:
    with CheckpointManager(root, no_dist=True, **options) as manager:
        manager.save(step, state(step), metrics={"loss": loss})


def failed_save(root: str) -> None:
    with CheckpointManager(root, no_dist=True, keep_policy=KeepLast(1)) as manager, contextlib.suppress(Exception):
        manager.save(LAST + 1, {"bad": open})


def sweep(root: str) -> None:
    Catalogue(open_store(root), stale_after_seconds=60).sweep()


def a_budget(root: str) -> None:
    with without_promoter():
        make_room(Tiers([Tier(root, max_bytes=60_000, when_full="drop", per_host=True)]), 0, LAST + 1)


def save_over(root: str) -> None:
    with contextlib.suppress(OSError, DcpError):
        dcp_all.save(state(LAST), checkpoint_id=f"{root}/step-{LAST}", no_dist=True)


# Deletion → how many sound checkpoints it leaves at least, if there were as many.
DELETIONS: dict[str, tuple[Callable[[str], object], int]] = {
    "prune": (lambda root: dcp(["prune", root, "--keep", "1", "--yes"]), 1),
    "prune --keep-part": (lambda root: dcp(["prune", root, "--keep", "1", "--keep-part", "weight", "--yes"]), LAST),
    "rm": (lambda root: dcp(["rm", f"{root}/step-1", "--yes"]), LAST - 3),
    "rm --part": (lambda root: dcp(["rm", f"{root}/step-{LAST}", "--part", "step", "--yes"]), LAST),
    "KeepLast": (lambda root: save(root, LAST + 1, 0.9, keep_policy=KeepLast(1)), 1),
    "KeepBest": (lambda root: save(root, LAST + 1, 0.9, keep_policy=KeepBest(1, "loss")), 1),
    "a save that fails": (failed_save, 1),
    "sweep": (sweep, LAST),
    "a budget": (a_budget, 1),
    "a lower step": (lambda root: save(root, 1, 0.9, keep_policy=KeepLast(1), lower_steps="allow"), 1),
    "a save over the last": (save_over, LAST - 1),
}
# Step that a deletion publishes before it removes anything.
PUBLISHES = {"KeepLast": LAST + 1, "KeepBest": LAST + 1, "a lower step": 1}


@pytest.fixture(scope="module")
def keepers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCP_KEEPER_DIR", str(tmp_path_factory.mktemp("k")))
        yield
        stop_keeper(KEEPER, kill=True)


class FileOfEachValue(HostStorageWriter):
    def _open(self, checkpoint_id: Any) -> Any:
        backend = super()._open(checkpoint_id)
        backend.single_file = False
        return backend


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of several steps, in which each value has a file of its own; tests copy it."""
    disks = tmp_path_factory.mktemp("saved")
    with on_host(disks, "a"), CheckpointManager(f"host://{NEAR}", no_dist=True, writer=FileOfEachValue) as manager:
        for step in range(1, LAST + 1):
            manager.save(step, state(step), metrics={"loss": 1 / step})
    return Path(f"{disks}/a{NEAR}")


_numbers = itertools.count()


@pytest.fixture(params=PLACES)
def root(request: pytest.FixtureRequest, saved: Path, tmp_path: Path) -> Iterator[str]:
    """A copy of the run, in a place that this process has not seen."""
    if request.param == "keeper":
        request.getfixturevalue("keepers")
        uri = f"keeper://{KEEPER}/{next(_numbers)}"
        for path in sorted(saved.glob("*/*")):
            with_folders(open_store(uri)).child(path.parent.name).publish(path.name, path.read_bytes())
        yield uri
        return
    near = Path(f"{tmp_path}/a{NEAR}")
    shutil.copytree(saved, near)
    for step in near.glob("step-*"):
        other = Path(f"{tmp_path}/b{NEAR}/{step.name}")
        other.mkdir(parents=True)
        small = min(step.glob("*.distcp"), key=lambda path: path.stat().st_size)
        for name in (".metadata", ".dcp-note.json"):
            shutil.copy(step / name, other)
        small.rename(other / small.name)
    with on_host(tmp_path, "a"):
        yield f"host://{NEAR}"


def step_store(root: str, step: int) -> Store:
    return with_folders(open_store(root)).child(f"step-{step}")


def sound_steps(root: str, place: Path) -> list[int]:
    """The steps whose every byte matches, over all hosts, ascending."""
    found = []
    for number, name in enumerate(with_folders(open_store(root)).folders()):
        store, whole = with_folders(open_store(root)).child(name), place / f"whole-{number}"
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir()
        for entry in store.list():
            (whole / entry.name).write_bytes(store.read(entry.name))
        if isinstance(store, HostFolder):
            for path in Path(f"{place}/b{NEAR}/{name}").glob("*.distcp"):
                shutil.copy(path, whole)
        marks = (whole / ".dcp-quarantined.json", whole / ".dcp-removing")
        with contextlib.suppress(OSError, DcpError):
            if not any(mark.exists() for mark in marks) and verify_checkpoint(LocalStore(whole)).ok:
                found.append(int(name.removeprefix("step-")))
    return sorted(found)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("deletion", DELETIONS)
def test_the_newest_sound_checkpoints_stay(root: str, tmp_path: Path, deletion: str, damage: str) -> None:
    for step in (LAST - 1, LAST):
        DAMAGE[damage](step_store(root, step))
    before = sound_steps(root, tmp_path)
    assert before[-1] == (LAST if damage in WHOLE else LAST - 2)
    delete, keep = DELETIONS[deletion]
    delete(root)
    after = sound_steps(root, tmp_path)
    assert before[-1] in after or PUBLISHES.get(deletion) in after
    assert len(after) >= min(keep, len(before))


@pytest.mark.parametrize("deletion", ["KeepLast", "a budget"])
def test_deletions_delete(root: str, tmp_path: Path, deletion: str) -> None:
    """Or the table above would show nothing."""
    DELETIONS[deletion][0](root)
    assert len(sound_steps(root, tmp_path)) < LAST


@pytest.mark.parametrize("damage", sorted(DAMAGE.keys() - UNSEEN_BY_RETENTION))
def test_retention_keeps_another_for_what_is_incomplete(root: str, tmp_path: Path, damage: str) -> None:
    for step in (LAST - 1, LAST):
        DAMAGE[damage](step_store(root, step))
    before = sound_steps(root, tmp_path)
    save(root, LAST + 1, 0.9, keep_policy=KeepLast(2))
    after = sound_steps(root, tmp_path)
    assert len(after) >= 2
    assert {LAST + 1, before[-1]} <= {*after}
