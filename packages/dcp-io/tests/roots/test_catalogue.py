"""What the catalogue sees in a root, removes from it and leaves alone. No checkpoint is saved here."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dcp_io import LocalStore
from dcp_io.checkpoints.remove_checkpoint import checkpoint_files
from dcp_io.roots.catalogue import Catalogue
from dcp_io.roots.records import CheckpointRecord, Note
from dcp_io.saves.save_files import ProcessIdentity, this_process
from dcp_manifest import CheckpointIndex, CheckpointNotFoundError
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import ManifestInfo
from dcp_manifest.index.stored_items import StoredItems


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(LocalStore(tmp_path), stale_after_seconds=60)


def checkpoint(root: Path, step: int, **files: str) -> Path:
    folder = root / f"step-{step}"
    folder.mkdir(parents=True)
    for name, content in {".metadata": "index", "__0_0.a.distcp": "", **files}.items():
        (folder / name).write_text(content)
    return folder


def sign(process: ProcessIdentity) -> str:
    return json.dumps(process.to_dict())


def dead() -> ProcessIdentity:
    here = this_process()
    return ProcessIdentity(here.host, here.boot_id, here.pid_namespace, 2**22 + 1, 1)


def elsewhere() -> ProcessIdentity:
    return ProcessIdentity("another-host", "x", "y", 1, 1)


def test_folders_are_found_by_name(catalogue: Catalogue, tmp_path: Path) -> None:
    for name in ("step-2", "step-10", "step-02", "step-x", "other", "step-"):
        (tmp_path / name).mkdir()
    assert [folder.step for folder in catalogue.folders()] == [2, 10]
    assert catalogue.records() == []


def test_records_hold_what_was_noted(catalogue: Catalogue, tmp_path: Path) -> None:
    catalogue.prepare(3, {"loss": 0.5})
    assert catalogue.records() == []
    (tmp_path / "step-3" / ".metadata").write_text("index")
    (record,) = catalogue.records()
    assert (record.step, dict(record.metrics), record.quarantined) == (3, {"loss": 0.5}, None)
    assert abs(record.created_seconds - time.time()) < 60
    catalogue.quarantine(3, "a bit flipped")
    assert catalogue.records()[0].quarantined == "a bit flipped"
    catalogue.prepare(3, {})
    assert {path.name for path in (tmp_path / "step-3").iterdir()} == {".dcp-note.json"}


def losses(catalogue: Catalogue) -> list[float]:
    return [record.metrics["loss"] for record in catalogue.records()]


def test_a_checkpoint_keeps_its_note_until_it_is_replaced(catalogue: Catalogue, tmp_path: Path) -> None:
    catalogue.prepare(3, {"loss": 0.5})
    (tmp_path / "step-3" / ".metadata").write_text("index")
    catalogue.published(3)
    assert losses(catalogue) == [0.5]
    catalogue.prepare(3, {"loss": 0.1})
    assert losses(catalogue) == [0.5]
    catalogue.failed(3)
    assert {path.name for path in (tmp_path / "step-3").iterdir()} == {".metadata", ".dcp-note.json"}
    catalogue.prepare(3, {"loss": 0.7})
    catalogue.published(3)
    assert losses(catalogue) == [0.7]
    assert {path.name for path in (tmp_path / "step-3").iterdir()} == {".metadata", ".dcp-note.json"}
    catalogue.prepare(3, {})
    assert catalogue.remove(3)
    assert not (tmp_path / "step-3").exists()


@pytest.mark.parametrize(
    ("process", "published_later", "left", "loss"),
    [
        (dead(), False, {".dcp-note.json"}, 0.5),
        (dead(), True, {".dcp-note.json"}, 0.1),
        (elsewhere(), True, {".dcp-note.json", ".dcp-note-next.json"}, 0.5),
    ],
    ids=["killed before", "killed after", "running"],
)
def test_the_note_of_a_killed_save_counts_if_its_checkpoint_came(
    catalogue: Catalogue, tmp_path: Path, process: ProcessIdentity, published_later: bool, left: set[str], loss: float
) -> None:
    folder = checkpoint(tmp_path, 3)
    (folder / ".dcp-note.json").write_bytes(Note(3, time.time(), {"loss": 0.5}, this_process()).to_bytes())
    catalogue.prepare(3, {"loss": 0.1})
    note = Note.from_bytes((folder / ".dcp-note-next.json").read_bytes())
    assert note is not None
    (folder / ".dcp-note-next.json").write_bytes(dataclasses.replace(note, process=process).to_bytes())
    if published_later:
        (folder / ".metadata").write_text("INDEX")
    for path in folder.iterdir():  # all of it within one tick of the storage's clock
        os.utime(path, (1000, 1000))
    assert catalogue.sweep() == []
    assert {path.name for path in folder.iterdir()} == {".metadata", "__0_0.a.distcp", *left}
    assert losses(catalogue) == [loss]


def test_notes_are_read_again_only_when_they_have_changed(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    real = LocalStore.read
    monkeypatch.setattr(LocalStore, "read", lambda store, name: (reads.append(name), real(store, name))[1])
    for step in (1, 2):
        catalogue.prepare(step, {"loss": step})
        (tmp_path / f"step-{step}" / ".metadata").write_text("index")
    for _ in range(3):
        assert losses(catalogue) == [1, 2]
    assert len(reads) == 2
    (tmp_path / "step-2" / ".dcp-note.json").write_bytes(Note(2, 0.0, {"loss": 9}, None).to_bytes())
    assert losses(catalogue) == [1, 9]
    assert len(reads) == 3


def test_a_note_from_before_notes_said_what_they_replace_counts(catalogue: Catalogue, tmp_path: Path) -> None:
    older = {"step": 1, "created": 5.0, "metrics": {"loss": 0.5}, "process": None}
    checkpoint(tmp_path, 1, **{".dcp-note.json": json.dumps(older)})
    assert losses(catalogue) == [0.5]


@pytest.mark.parametrize("clock", [0.0, 5e9], ids=["behind", "ahead"])
def test_the_order_of_saves_does_not_depend_on_clocks(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: float
) -> None:
    clocks = {1: 2e9, 2: clock, 3: 2e9, 4: 2e9}  # of the hosts that save
    for step, now in clocks.items():
        monkeypatch.setattr("dcp_io.roots.catalogue.time", SimpleNamespace(time=lambda now=now: now))
        catalogue.prepare(step, {}, after=catalogue.highest())
        (tmp_path / f"step-{step}" / ".metadata").write_text("index")
    assert [record.step for record in CheckpointRecord.by_creation(reversed(catalogue.records()))] == [1, 2, 3, 4]


def test_the_highest_is_the_one_that_is_not_known_to_be_damaged(catalogue: Catalogue, tmp_path: Path) -> None:
    assert catalogue.highest() is None
    for step in (9, 10, 11, 12):
        checkpoint(tmp_path, step)
    catalogue.quarantine(12, "a bit flipped")
    (tmp_path / "step-11" / ".dcp-removing").write_text("{}")
    (tmp_path / "step-13").mkdir()
    found = catalogue.highest()
    assert found is not None
    assert found.step == 10


def test_steps_have_any_number_of_digits(catalogue: Catalogue, tmp_path: Path) -> None:
    checkpoint(tmp_path, 10**20)
    assert [record.step for record in catalogue.records()] == [10**20]


@pytest.mark.parametrize(
    "note", ["", "[]", "{}", '{"step": 1}', '{"step": 1, "created": NaN, "metrics": {}, "process": null}']
)
def test_a_note_that_cannot_be_read_is_none(catalogue: Catalogue, tmp_path: Path, note: str) -> None:
    folder = checkpoint(tmp_path, 1, **{".dcp-note.json": note})
    os.utime(folder / ".metadata", (1000, 1000))
    (record,) = catalogue.records()
    assert (record.step, record.created_seconds, dict(record.metrics)) == (1, 1000.0, {})


def test_damage_is_told(catalogue: Catalogue, tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    with pytest.raises(ValueError, match=r"\.metadata"):
        catalogue.check(1)
    with pytest.raises(CheckpointNotFoundError, match="step-2"):
        catalogue.check(2)


@pytest.mark.parametrize(
    ("sign_of", "age_seconds", "removed"),
    [
        (this_process(), 0, False),
        (this_process(), 100, False),
        (elsewhere(), 0, False),
        (elsewhere(), 100, True),
        (dead(), 0, True),
        (None, 0, False),
    ],
    ids=["ours", "ours, for long", "another host's", "another host's, stale", "a dead one's", "unreadable"],
)
def test_readers_keep_what_they_read(
    catalogue: Catalogue, tmp_path: Path, sign_of: ProcessIdentity | None, age_seconds: float, removed: bool
) -> None:
    folder = checkpoint(tmp_path, 1, **{".dcp-reading-1": "?" if sign_of is None else sign(sign_of)})
    then = time.time() - age_seconds
    os.utime(folder / ".dcp-reading-1", (then, then))
    assert catalogue.remove(1) == removed
    assert folder.exists() != removed
    assert not (folder / ".dcp-removing").exists()


def test_checkpoints_are_removed_from_a_full_disk(
    catalogue: Catalogue, tmp_path: Path, fill_disk: Callable[[], None]
) -> None:
    folder = checkpoint(tmp_path, 1)
    fill_disk()
    assert catalogue.remove(1)
    assert not folder.exists()


def test_reading_leaves_a_sign_only_while_it_lasts(catalogue: Catalogue, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 1)
    with catalogue.reading(1):
        assert not catalogue.remove(1)
    assert {path.name for path in folder.iterdir()} == {".metadata", "__0_0.a.distcp"}
    (folder / ".dcp-removing").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match="being removed"), catalogue.reading(1):
        pytest.fail("not reached")
    assert not list(folder.glob(".dcp-reading-*"))


def test_interrupted_removals_are_ended(catalogue: Catalogue, tmp_path: Path) -> None:
    for step, has_index in ((1, True), (2, False)):
        folder = checkpoint(tmp_path, step, **{".dcp-removing": "{}"})
        if not has_index:
            (folder / ".metadata").unlink()
    assert catalogue.records() == []
    assert catalogue.sweep() == [1, 2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("process", "age_seconds", "swept"),
    [(dead(), 0, True), (elsewhere(), 0, False), (elsewhere(), 100, True), (this_process(), 0, True)],
    ids=["dead", "another host", "another host, stale", "ours, not running"],
)
def test_what_a_save_left_goes_once_nobody_saves(
    catalogue: Catalogue, tmp_path: Path, process: ProcessIdentity, age_seconds: float, swept: bool
) -> None:
    folder = checkpoint(tmp_path, 1)
    (folder / ".metadata").unlink()
    (folder / ".dcp-note.json").write_bytes(Note(1, time.time() - age_seconds, {}, process).to_bytes())
    assert catalogue.sweep(running={1}) == []
    assert catalogue.sweep() == ([1] if swept else [])
    assert folder.exists() != swept


def test_latest_is_a_name(catalogue: Catalogue, tmp_path: Path) -> None:
    for step in (1, 12):
        catalogue.published(step)
    assert (tmp_path / "latest").read_text() == "step-12\n"


def test_signs_of_the_dead_go_from_checkpoints_that_stay(catalogue: Catalogue, tmp_path: Path) -> None:
    marker = {"save_id": "a", "rank": None, "phase": "saving", "started_ns": 1, "replaced": []}
    files = {
        ".dcp-reading-1": sign(dead()),
        ".dcp-reading-2": sign(this_process()),
        ".dcp-save-b": json.dumps({**marker, "save_id": "b", "process": elsewhere().to_dict()}),
    }
    folder = checkpoint(tmp_path, 1, **files)
    (folder / ".metadata").write_bytes(encode(_index()))
    (folder / ".dcp-save-c").write_text(json.dumps({**marker, "save_id": "c", "process": dead().to_dict()}))
    (folder / "__0_0.c.distcp").write_bytes(b"")
    assert catalogue.sweep() == []
    kept = {".metadata", "__0_0.a.distcp", ".dcp-reading-2", ".dcp-save-b"}
    assert {path.name for path in folder.iterdir()} == kept


def _index() -> CheckpointIndex:
    none = np.zeros(0, np.int64)
    return CheckpointIndex(
        dtypes=(),
        files=[],
        chains=(),
        tensor_names=[],
        tensor_dtype=none.astype(np.uint8),
        tensor_flags=none.astype(np.uint8),
        tensor_ndim=none.astype(np.uint8),
        tensor_owner=none.astype(np.uint32),
        tensor_shape=none,
        tensor_chunks=none,
        chunk_offsets=none,
        chunk_sizes=none,
        chunk_items=StoredItems.of([]).columns,
        object_names=[],
        object_owner=none.astype(np.uint32),
        object_items=StoredItems.of([]).columns,
        info=ManifestInfo(save_id="0123", world_size=1, writer="test"),
    )


def test_temporary_files_of_the_dead_go(catalogue: Catalogue, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 1)
    old = [tmp_path / ".latest..0a.tmp", folder / "..dcp-note.json..0b.tmp", folder / "..dcp-reading-1..0c.tmp"]
    new = [tmp_path / ".latest..1a.tmp", folder / "..dcp-note.json..1b.tmp"]
    others = [tmp_path / ".mine.tmp", tmp_path / "latest.tmp", folder / "..dcp-other..0a.tmp"]
    for path in (*old, *new, *others):
        path.write_text("")
    for path in (*old, *others):
        os.utime(path, (1000, 1000))
    for path in new:
        os.utime(path, (time.time() + 3600,) * 2)
    catalogue.sweep()
    assert [path.exists() for path in old] == [False] * 3
    assert all(path.exists() for path in (*new, *others))


def test_another_prefix_names_the_folders(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / ".metadata").write_text("index")
    of_a_trainer = Catalogue(LocalStore(tmp_path), stale_after_seconds=60, folder_prefix="checkpoint-")
    assert [record.step for record in of_a_trainer.records()] == [7]
    assert of_a_trainer.folder_name(8) == "checkpoint-8"


@pytest.mark.parametrize("prefix", ["a/step-", "run-", "step-1."])
def test_a_prefix_without_a_step_is_refused(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(ValueError, match="choose one like 'step-'"):
        Catalogue(LocalStore(tmp_path), stale_after_seconds=60, folder_prefix=prefix)


def test_an_index_that_a_killed_publisher_left_is_removed_once_nobody_saves(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, 3)
    left, fresh = (folder / f"..metadata.0123.{number}.tmp" for number in "ab")
    for path in (left, fresh):
        path.write_bytes(b"\x80half")
    os.utime(left, (time.time() - 100,) * 2)
    marker = folder / ".dcp-save-0123"
    values = {"save_id": "0123", "rank": None, "process": elsewhere().to_dict(), "phase": "saving"}
    marker.write_text(json.dumps({**values, "started_ns": 1, "replaced": []}))
    catalogue.sweep()
    assert left.exists()
    marker.unlink()
    catalogue.sweep()
    assert (left.exists(), fresh.exists()) == (False, True)


ACTIONS: dict[str, Callable[[Catalogue], object]] = {
    "sweep": lambda catalogue: catalogue.sweep(),
    "remove": lambda catalogue: catalogue.remove(1),
    "list": lambda catalogue: catalogue.records(),
    "highest": lambda catalogue: catalogue.highest(),
    "prepare": lambda catalogue: catalogue.prepare(1, {}, after=None),
    "failed": lambda catalogue: catalogue.failed(1),
    "what would be removed": lambda catalogue: checkpoint_files(catalogue.store_of(1), ["__0_0.a.distcp"]),
}
OTHERS = [
    ".dcp-reading-1",
    ".dcp-save-0123456789abcdef",
    ".dcp-note.json",
    ".dcp-note-next.json",
    ".dcp-bad.json",
    "..dcp-note.json..0b.tmp",
    "__1_0.0123456789abcdef.distcp",
    ".metadata",
]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("action", ACTIONS)
def test_what_others_remove_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, name: str
) -> None:
    """Another process removes a file of the folder at each moment: a lease that ends, a save that is over."""
    calls, at = 0, 0

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                (tmp_path / f"{at}/step-1" / name).unlink(missing_ok=True)
            return method(*arguments, **options)

        return call

    for each in ("list", "open", "read", "size", "exists", "delete"):
        monkeypatch.setattr(LocalStore, each, watched(getattr(LocalStore, each)))
    while at <= calls:
        at, calls = at + 1, 0
        files = dict.fromkeys(OTHERS, sign(dead()))
        folder = checkpoint(tmp_path / str(at), 1, **files)
        for path in folder.iterdir():
            os.utime(path, (time.time() - 7200,) * 2)
        ACTIONS[action](Catalogue(LocalStore(tmp_path / str(at)), stale_after_seconds=60))
    assert at > 1


def test_a_checkpoint_that_is_not_there_is_said_first(
    catalogue: Catalogue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = rf"there is no checkpoint in .*{tmp_path.name}/step-5.*the directory is missing"
    with pytest.raises(CheckpointNotFoundError, match=expected), catalogue.reading(5):
        pass
    assert caplog.messages == []  # no word about a sign that cannot be written in a missing folder
    assert [*tmp_path.iterdir()] == []
