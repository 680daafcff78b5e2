"""`FileSystemWriter(deduplicate=True)`: equal files become links, and nothing else differs from a save without it."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

from dcp_core import load, save
from dcp_crash import Fault, run_traced
from dcp_fs import FileSystemWriter
from dcp_io import LocalStore, verify_checkpoint
from dcp_io.checkpoints.drop_parts import SmallerCheckpoint
from dcp_io.saves.save_files import is_marker_temporary
from dcp_io.writing import deduplication
from integration_tests.kits.damage import flip

ROWS = 20_000  # 80 KB: larger than the items that are never linked
STEPS = 3


def values(step: int, *, frozen: int = 8, changed: int = 2) -> dict[str, Any]:
    """Frozen tensors, which are equal in all steps, and others."""
    names = [f"tower.{n}" for n in range(frozen)] + [f"head.{n}" for n in range(changed)]
    found: dict[str, Any] = {}
    for n, name in enumerate(names):
        seed = n if n < frozen else 1000 * step + n
        found[name] = torch.randn(ROWS, generator=torch.Generator().manual_seed(seed))
    return {**found, "small": torch.full((5,), step), "step": step}


def save_to(path: Path, state: dict[str, Any], **options: Any) -> Path:
    save(state, storage_writer=FileSystemWriter(path, **{"deduplicate": True, "single_file_per_rank": False} | options))
    return path


def links(path: Path, base: Path) -> int:
    """How many data files of a checkpoint are also in another one."""
    inodes = {file.stat().st_ino for file in base.glob("*.distcp")}
    return sum(file.stat().st_ino in inodes for file in path.glob("*.distcp"))


def check(path: Path, state: dict[str, Any]) -> None:
    assert verify_checkpoint(path).problems == ()
    loaded = {name: torch.zeros_like(one) if isinstance(one, torch.Tensor) else 0 for name, one in state.items()}
    load(loaded, checkpoint_id=path)
    for name, value in state.items():
        assert torch.equal(torch.as_tensor(loaded[name]), torch.as_tensor(value)), name


def test_frozen_values_are_linked(tmp_path: Path) -> None:
    paths = [save_to(tmp_path / f"step-{step}", values(step)) for step in range(STEPS)]
    assert [links(path, paths[0]) for path in paths[1:]] == [8, 8]
    assert links(paths[2], paths[1]) == 8
    for step in (0, 2):  # any checkpoint may go
        shutil.rmtree(paths[step])
        check(paths[1], values(1))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_reads_linked_files(tmp_path: Path) -> None:
    paths = [save_to(tmp_path / f"step-{step}", values(step)) for step in range(STEPS)]
    loaded = {name: torch.zeros_like(one) for name, one in values(0).items() if isinstance(one, torch.Tensor)}
    stock.load(loaded, checkpoint_id=paths[2], no_dist=True)
    assert all(torch.equal(loaded[name], values(2)[name]) for name in loaded)


def test_mixed_files_are_separated_by_the_second_save(tmp_path: Path) -> None:
    """Ten tensors are less than a file's size, so the first save has one file for all of them."""
    options = {"single_file_per_rank": True, "thread_count": 1}
    paths = [save_to(tmp_path / f"step-{step}", values(step), **options) for step in range(STEPS)]
    assert [links(path, before) for before, path in itertools.pairwise(paths)] == [0, 1]
    for step, path in enumerate(paths):
        check(path, values(step))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_with_few_changed_values_is_linked_by_the_second_save(tmp_path: Path) -> None:
    """Wherever the changed values are: each of two files has one of them."""
    options = {"single_file_per_rank": True, "thread_count": 1}

    def state(step: int) -> dict[str, Any]:
        return {key: value.repeat(30) for key, value in values(step, frozen=38).items() if torch.is_tensor(value)}

    paths = [save_to(tmp_path / f"step-{step}", state(step), **options) for step in range(STEPS)]
    assert len([*paths[0].glob("*.distcp")]) > 20
    for before, path in itertools.pairwise(paths):
        assert sum(file.stat().st_size for file in path.glob("*.distcp") if file.stat().st_nlink == 1) < 3 * 2_500_000
        assert links(path, before) > 17
    shutil.rmtree(paths[0])
    for step in (1, 2):
        check(paths[step], state(step))
    loaded = {key: torch.zeros_like(value) for key, value in state(2).items()}
    stock.load(loaded, checkpoint_id=paths[2], no_dist=True)
    assert all(torch.equal(loaded[key], value) for key, value in state(2).items())


def test_old_values_take_an_eighth_of_linked_files_at_most(tmp_path: Path) -> None:
    """One value more changes in each step; the first file is linked until five of 32 have changed."""
    state = {f"t.{n}": torch.randn(ROWS) for n in range(32)}
    path = save_to(tmp_path / "step-0", state, single_file_per_rank=True, thread_count=1)
    linked = []
    for step in range(1, 7):
        state = state | {f"t.{step}": torch.randn(ROWS)}
        before, path = path, save_to(tmp_path / f"step-{step}", state, single_file_per_rank=True, thread_count=1)
        linked.append(links(path, before))
        assert sum(file.stat().st_size for file in path.glob("*.distcp")) < 1.2 * 4 * ROWS * len(state)
        check(path, state)
    assert linked == [1, 2, 3, 4, 4, 6]


def test_damage_is_found_in_linked_files_with_old_values(tmp_path: Path) -> None:
    options = {"single_file_per_rank": True, "thread_count": 1}
    first = {f"t.{n}": torch.randn(ROWS) for n in range(16)}
    save_to(tmp_path / "step-0", first, **options)
    path = save_to(tmp_path / "step-1", first | {"t.15": torch.randn(ROWS)}, **options)
    (linked,) = path.glob("*linked*")
    shutil.rmtree(tmp_path / "step-0")
    assert verify_checkpoint(path).problems == ()
    flip(linked, 70_000)
    assert [problem.file for problem in verify_checkpoint(path).problems] == [linked.name]
    flip(linked, 70_000)
    os.truncate(linked, 15 * 4 * ROWS // 2)
    assert {problem.file for problem in verify_checkpoint(path).problems} == {linked.name}


@pytest.mark.parametrize("copies", [(1, 1), (1, 3), (3, 1), (3, 2)])
def test_equal_values_within_a_checkpoint(tmp_path: Path, copies: tuple[int, int]) -> None:
    """A file is linked at most as often as its values are wanted."""
    states = [{f"zeros.{n}": torch.zeros(ROWS) for n in range(count)} for count in copies]
    for single in (True, False):
        for step, state in enumerate(states):
            path = save_to(tmp_path / str(single) / f"step-{step}", state, single_file_per_rank=single)
            check(path, state)
    assert links(path, tmp_path / "False" / "step-0") == min(copies)


def test_other_forms_of_the_same_bytes_are_not_equal(tmp_path: Path) -> None:
    data = torch.randn(ROWS)
    base = save_to(tmp_path / "step-0", {"a": data})
    others = {"dtype": data.view(torch.int32), "shape": data.view(2, -1)}
    for name, other in others.items():
        path = save_to(tmp_path / name / "step-1", {"a": other}, deduplicate=base)
        check(path, {"a": other})
        assert links(path, base) == 0
    assert links(save_to(tmp_path / "raw" / "step-1", {"a": data}, deduplicate=base, layout="raw"), base) == 0
    assert links(save_to(tmp_path / "same" / "step-1", {"b": data}, deduplicate=base), base) == 1


def test_tensors_without_contiguous_memory(tmp_path: Path) -> None:
    data = torch.randn(200, 300)
    base = save_to(tmp_path / "step-0", {"a": data.t().contiguous()})
    path = save_to(tmp_path / "step-1", {"a": data.t()})
    assert links(path, base) == 1
    check(path, {"a": data.t()})


def test_a_step_that_is_saved_again(tmp_path: Path) -> None:
    for step in range(STEPS):
        path = save_to(tmp_path / "latest", values(step))
        check(path, values(step))
        assert len([*path.glob("*digests0*")]) == 1
        assert len([*path.glob("*linked*")]) == (8 if step else 0)


def test_nothing_is_linked_to_files_of_a_quarantined_checkpoint(tmp_path: Path) -> None:
    """Not even by a later checkpoint that is not quarantined, and has a link to the damaged file."""
    paths = [save_to(tmp_path / f"step-{step}", values(step)) for step in range(2)]
    (paths[0] / ".dcp-quarantined.json").write_text("{}")
    path = save_to(tmp_path / "step-2", values(2))
    assert (links(path, paths[0]), links(path, paths[1])) == (0, 0)
    assert links(save_to(tmp_path / "step-3", values(3)), path) == 8


def test_links_in_a_quarantined_checkpoint_fail_no_save(tmp_path: Path) -> None:
    base = save_to(tmp_path / "step-0", values(0))
    (base / ".dcp-quarantined.json").write_text("{}")
    (base / "gone.bin").symlink_to("nowhere")
    (base / "away.bin").symlink_to("/etc/passwd")
    path = save_to(tmp_path / "step-1", values(1))
    assert links(path, base) == 0
    check(path, values(1))


def test_no_base_is_looked_for_below_the_parent_directory(tmp_path: Path) -> None:
    base = save_to(tmp_path / "data" / "step-7", values(0))
    assert links(save_to(tmp_path / "step-1", values(1)), base) == 0


@pytest.mark.parametrize(
    ("field", "bits", "linked"), [("st_uid", 1, 0), ("st_gid", 1, 0), ("st_mode", 0o040, 0), ("st_mode", 0o020, 8)]
)
def test_nothing_is_linked_to_files_of_other_users_or_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, bits: int, linked: int
) -> None:
    """Others could change the files later, or not read the new checkpoint; a base that is named is used."""
    base, real = save_to(tmp_path / "step-0", values(0)), os.stat
    monkeypatch.setattr(deduplication, "_last", {})

    def stat(path: Any, **options: Any) -> Any:
        found = real(path, **options)
        facts = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        return SimpleNamespace(**facts | {field: facts[field] ^ bits}) if str(path).startswith(str(base)) else found

    with monkeypatch.context() as others:
        others.setattr(os, "stat", stat)
        save_to(tmp_path / "step-1", values(1))
        save_to(tmp_path / "step-2", values(2), deduplicate=base)
    assert links(tmp_path / "step-1", base) == linked
    assert links(tmp_path / "step-2", base) == 8


@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize(("before", "after"), [*itertools.permutations((0o077, 0o027, 0o022), 2)])
def test_all_files_have_the_permissions_of_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int, restarts: bool
) -> None:
    old = os.umask(before)
    try:
        # The second save is into a directory that another umask has created, by another process or by the same one.
        for number, (step, umask) in enumerate(((0, before), (0, after), (1, before), (2, after), (3, after))):
            os.umask(umask)
            path = save_to(tmp_path / f"step-{step}", values(number))
            if restarts:
                monkeypatch.setattr(deduplication, "_last", {})
            assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o666 & ~umask}
        assert links(path, tmp_path / "step-2") == 8
    finally:
        os.umask(old)


@pytest.mark.parametrize("off", [False, None, ""])
def test_it_can_be_switched_off(tmp_path: Path, off: Any) -> None:
    base = save_to(tmp_path / "step-0", values(0))
    assert links(save_to(tmp_path / "step-1", values(1), deduplicate=off), base) == 0


@pytest.mark.parametrize("exists", [True, False])
def test_a_base_without_digests_is_warned_of(tmp_path: Path, exists: bool, caplog: pytest.LogCaptureFixture) -> None:
    if exists:
        save_to(tmp_path / "base", values(0), deduplicate=False)
    save_to(tmp_path / "step-1", values(1), deduplicate=tmp_path / "base")
    assert f"nothing in {tmp_path / 'base'} is linked: no save with deduplicate=" in caplog.text


def test_parts_within_parts_have_files_of_their_own(tmp_path: Path) -> None:
    state = {f"app.{name}": torch.full((ROWS,), n) for n, name in enumerate(["model.a", "model.b", "other", "models"])}
    save_to(tmp_path, state, deduplicate=False, single_file_per_rank=True, parts=["app", "app.model"], thread_count=1)
    assert len([*tmp_path.glob("*.distcp")]) == 2
    smaller = SmallerCheckpoint(LocalStore(tmp_path), keep=["app.model"])
    assert smaller.bytes == max(file.stat().st_size for file in tmp_path.glob("*.distcp"))  # nothing is copied


@pytest.mark.parametrize("damage", ["truncated", "gone", "digests", "no-digests", "no-links", "empty"])
def test_a_base_that_cannot_be_used(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_to(tmp_path / "step-0", values(0))
    (digests,) = base.glob("*digests0*")
    for file in [*base.glob("__0_[0-9]*.distcp")]:
        if damage == "truncated":
            os.truncate(file, file.stat().st_size - 1)
        elif damage == "gone":
            file.unlink()
    if damage == "digests":
        flip(digests, digests.stat().st_size // 2)
    elif damage == "empty":
        digests.write_bytes(b"")
    elif damage == "no-digests":
        digests.unlink()
    elif damage == "no-links":  # another file system

        def link(*_: object, **__: object) -> None:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", link)
    path = save_to(tmp_path / "step-1", values(1))
    assert links(path, base) == 0
    check(path, values(1))


def test_a_smaller_checkpoint_has_no_digests(tmp_path: Path) -> None:
    base = save_to(tmp_path / "step-0", values(0))
    SmallerCheckpoint(LocalStore(base), drop=["head"]).publish(by="a test")
    assert not [*base.glob("*digests0*")]
    assert verify_checkpoint(base).problems == ()
    check(save_to(tmp_path / "step-1", values(1)), values(1))


def test_settings_that_exclude_each_other(tmp_path: Path) -> None:
    for options in ({"compression": "zstd"}, {"sync_files": False}):
        with pytest.raises(ValueError, match="deduplicate excludes"):
            FileSystemWriter(tmp_path, deduplicate=True, **options)  # type: ignore[arg-type]


@pytest.mark.traced
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_kill_at_each_system_call(tmp_path: Path, every: int) -> None:
    """The old checkpoint stays whole, and the new one is complete or absent; the next save removes what is left."""
    small = {"frozen": 2, "changed": 1}
    number, struck, completed = 1, True, 0
    while struck:
        root = tmp_path / str(number)
        base, path = save_to(root / "step-0", values(0, **small)), root / "step-1"
        struck = run_traced(
            lambda rank, path=path: save_to(path, values(1, **small), thread_count=1) and None,
            root,
            fault=Fault("kill", number),
        ).struck
        check(base, values(0, **small))
        if (path / ".metadata").exists():
            completed += 1
            check(path, values(1, **small))
        save_to(path, values(2, **small))
        check(path, values(2, **small))
        left = [name for name in os.listdir(path) if not is_marker_temporary(name)]  # which go when they are old
        assert len(left) == 3 + 1 + 1 + 1  # tensors, small values, digests and the index
        shutil.rmtree(root)
        number += every
    assert number > 50
    assert completed > 0
