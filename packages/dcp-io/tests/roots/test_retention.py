"""Which checkpoints stay, and that the others are removed: for managers, promoters and `dcp prune`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dcp_io import CheckpointRecord, KeepAll, KeepBest, KeepEvery, KeepLast, KeepPolicy, LocalStore, verify_checkpoint
from dcp_io.checkpoints.drop_parts import SmallerCheckpoint
from dcp_io.roots.catalogue import Catalogue
from dcp_io.roots.records import Note
from dcp_manifest import CheckpointIndex, index_of
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
    whole = dict.fromkeys(stay)
    assert policy.select(RECORDS, protected, lambda step: step not in unfit) == whole
    assert policy.select(RECORDS[::-1], protected, lambda step: step not in unfit) == whole
    assert policy.select([], protected, lambda step: True) == dict.fromkeys(protected)


@pytest.mark.parametrize(
    ("policy", "protected", "unfit", "stay"),
    [
        (KeepAll(parts=["m"]), (), (), {10: ("m",), 20: ("m",), 30: ("m",), 40: None}),
        (KeepLast(1) | KeepEvery(10, parts=["m", "n"]), (10,), (), {10: None, 20: ("m", "n"), 30: None, 40: None}),
        (KeepLast(2, parts=["m"]) | KeepEvery(20, parts=["n", "m"]), (), (), {20: ("m", "n"), 30: ("m",), 40: None}),
        (KeepLast(1, parts=["m"]), (), (30,), {20: ("m",), 30: None, 40: None}),
        (KeepBest(1, "loss", parts=["m"]) | KeepEvery(10), (), (), {10: None, 20: None, 30: None, 40: None}),
    ],
)
def test_select_says_which_parts_stay(
    policy: KeepPolicy, protected: tuple[int, ...], unfit: tuple[int, ...], stay: dict[int, tuple[str, ...] | None]
) -> None:
    assert policy.select(RECORDS, protected, lambda step: step not in unfit) == stay


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


VALUES = [{"m.a": b"1" * 5000, "o.a": b"2" * 9000}, {"m.b": b"3", "o.b": b"4"}]
MODEL = {"m.a": b"1" * 5000, "m.b": b"3"}


@pytest.fixture
def trained(tmp_path: Path, helpers: SimpleNamespace) -> Catalogue:
    """Five checkpoints with notes, as of a manager."""
    catalogue = Catalogue(LocalStore(tmp_path), stale_after_seconds=60)
    for step in (10, 20, 30, 40, 50):
        catalogue.prepare(step, {"loss": float(step)})
        helpers.save_all(catalogue.store_of(step), VALUES)
        catalogue.published(step)
    return catalogue


def whole(catalogue: Catalogue, helpers: SimpleNamespace) -> dict[int, bool]:
    """Step → whether nothing was removed from its checkpoint."""
    found = {}
    for folder in catalogue.folders():
        values = helpers.load_all(folder.store)
        assert values in (MODEL, helpers.merged(VALUES))
        assert not verify_checkpoint(folder.store).problems
        found[folder.step] = values != MODEL
    return found


def test_retain_removes_parts(trained: Catalogue, helpers: SimpleNamespace) -> None:
    records = trained.records()
    policy = KeepLast(2) | KeepEvery(20, parts=["m"])
    assert trained.retain(policy, protected=lambda _: ())[0] == [10, 30]
    assert whole(trained, helpers) == {20: False, 40: True, 50: True}
    assert trained.records() == [record for record in records if record.step in (20, 40, 50)]
    assert index_of(trained.store_of(20)).info.dropped["o"].startswith("KeepEvery(20, parts=['m']), 20")
    names = {name for folder in trained.folders() for name in folder.names if name.startswith(".dcp")}
    assert names == {".dcp-note.json"}


def test_a_link_in_the_root_keeps_its_step_whole(
    trained: Catalogue, helpers: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "best").symlink_to("step-20")
    (tmp_path / "of a friend").symlink_to(tmp_path / "step-30" / ".metadata")
    for policy in (KeepLast(1) | KeepEvery(20, parts=["m"]), KeepLast(1) | KeepEvery(20, parts=["m"]), KeepLast(1)):
        trained.retain(policy, protected=lambda _: ())
    assert whole(trained, helpers) == {20: True, 30: True, 50: True}
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    why = "stays as it is, since a symbolic link points to it"
    assert sorted(warned) == [
        f"step 20 {why}: best; remove the link if it may go",
        f"step 30 {why}: of a friend; remove the link if it may go",
    ]
    (tmp_path / "best").unlink()
    assert trained.retain(KeepLast(1), protected=lambda _: ())[0] == [20]


def test_retain_reads_each_index_once(trained: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(
        "dcp_io.roots.catalogue.SmallerCheckpoint",
        lambda store, **options: read.append(store.url[-2:]) or SmallerCheckpoint(store, **options),
    )
    policy = KeepLast(1) | KeepAll(parts=["m"])
    for _ in range(4):
        trained.retain(policy, protected=lambda _: ())
    assert read == ["10", "20", "30", "40"] * 2  # before it was made smaller, and after
    trained.retain(KeepLast(1) | KeepAll(parts=["m.a"]), protected=lambda _: ())
    assert len(read) == 12
    trained.retain(KeepAll(), protected=lambda _: ())
    assert len(read) == 12


def test_what_retain_leaves_whole(
    trained: Catalogue, helpers: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    policy = KeepAll(parts=["m"])
    trained.quarantine(10, "a bit flipped")
    trained.prepare(40, {})  # a save that may have been killed: its note is compared with the index
    with trained.reading(20):
        trained.retain(policy, protected=lambda _: {30})
    assert whole(trained, helpers) == dict.fromkeys((10, 20, 30, 40, 50), True)
    trained.failed(40)
    trained.store_of(30).delete(next(name for name in helpers.names(trained.store_of(30)) if name[:4] == "__1_"))
    trained = Catalogue(trained.store, stale_after_seconds=60)  # which has not read any of them
    trained.retain(policy, protected=lambda _: ())
    assert "step 30 does not count" in caplog.text
    trained.remove(30)
    assert whole(trained, helpers) == {10: True, 20: False, 40: False, 50: True}
    trained.retain(KeepAll(parts=["x"]), protected=lambda _: ())
    assert whole(trained, helpers) == {10: True, 20: False, 40: False, 50: True}
    assert "step-40 stays whole: it has nothing of x" in caplog.text


def test_an_unknown_part_keeps_the_checkpoint_whole(
    trained: Catalogue, helpers: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """One of several names is misspelt: what it means would be lost for good."""
    policy = KeepLast(1) | KeepAll(parts=["m", "o.aa"])
    for _ in range(3):
        trained.retain(policy, protected=lambda _: ())
    assert whole(trained, helpers) == dict.fromkeys((10, 20, 30, 40, 50), True)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    assert said[0].endswith("step-10 stays whole: it has nothing of o.aa (similar: o.a)")
    trained.retain(KeepLast(1) | KeepAll(parts=["m"]), protected=lambda _: ())
    trained.retain(policy, protected=lambda _: ())
    assert whole(trained, helpers)[10] is False


def test_what_was_removed_before_is_not_unknown(
    trained: Catalogue, helpers: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    trained.retain(KeepLast(1) | KeepAll(parts=["m", "o"]), protected=lambda _: ())
    trained.retain(KeepLast(1) | KeepAll(parts=["m"]), protected=lambda _: ())
    trained.retain(KeepLast(1) | KeepAll(parts=["m", "o"]), protected=lambda _: ())
    assert whole(trained, helpers) == {10: False, 20: False, 30: False, 40: False, 50: True}
    assert not caplog.records


def test_a_damaged_value_is_copied_once(
    trained: Catalogue,
    helpers: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = index_of(trained.store_of(20))
    item = index.stored_item(index.chunk_items, index.tensor_names.index("m.a"))
    helpers.flip(trained.store_of(20), item.file, item.offset + item.lead)
    tried: list[str] = []
    publish = SmallerCheckpoint.publish

    def noted(smaller: SmallerCheckpoint, **options: Any) -> None:
        tried.append(",".join(smaller.parts))
        publish(smaller, **options)

    monkeypatch.setattr(SmallerCheckpoint, "publish", noted)
    for _ in range(3):
        trained.retain(KeepAll(parts=["m"]), protected=lambda _: ())
    assert tried.count("o") == 4  # of steps 10, 20, 30 and 40, once each
    assert caplog.text.count("step-20 stays whole until it changes, since it is damaged") == 1
    helpers.save_all(trained.store_of(20), VALUES)
    trained.retain(KeepAll(parts=["m"]), protected=lambda _: ())
    assert whole(trained, helpers) == {10: False, 20: False, 30: False, 40: False, 50: True}


def test_retain_goes_on_after_a_failure(
    trained: Catalogue, helpers: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    index = index_of(trained.store_of(20))
    item = index.stored_item(index.chunk_items, index.tensor_names.index("m.a"))
    helpers.flip(trained.store_of(20), item.file, item.offset + item.lead)
    trained.retain(KeepAll(parts=["m"]), protected=lambda _: ())
    assert "step-20 stays whole until it changes, since it is damaged: bytes" in caplog.text
    assert [index_of(folder.store).info.dropped != {} for folder in trained.folders()] == [
        True,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("refused", ["delete", "open", "list"])
def test_each_step_is_warned_of_once_however_many_saves_follow(
    make: Callable[..., Catalogue], caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    """A file system that refuses deletions or reads, as one with legal holds does."""
    catalogue = make(10, 20, 30)
    for step in (10, 20, 30):
        catalogue.store_of(step).publish(".dcp-note-next.json", b"{}")
    real = getattr(LocalStore, refused)

    def refuse(store: LocalStore, *asked: object) -> object:
        if "step-" not in store.path:
            return real(store, *asked)
        raise PermissionError(13, "Permission denied")

    seen = []
    with mock.patch.object(LocalStore, refused, refuse):
        for _ in range(4):
            catalogue.retain(KeepLast(1), protected=lambda _: ())
            catalogue.sweep()
            seen.append(len(caplog.records))
    assert seen[0] >= 2
    assert seen[1:] == seen[:1] * 3
