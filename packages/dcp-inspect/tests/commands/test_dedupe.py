"""`dcp dedupe`: what is linked, what is left alone, and what a kill at any system call leaves."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_crash import Fault, run_traced
from dcp_inspect.cli import run
from dcp_inspect.commands import dedupe
from dcp_io import LocalStore
from dcp_io.saves.save_files import Marker, mark_bytes, this_process
from dcp_manifest import index_of
from integration_tests.kits.damage import flip

Dcp = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]
DataFile = Callable[[Path], Path]

LONG_AGO = time.time() - 2 * 3600


def found(dcp: Dcp, *arguments: object, code: int = 0) -> Any:
    got, out, _ = dcp("dedupe", *arguments, "--json")
    assert got == code
    return json.loads(out)


def foreign(path: Path, data: bytes, *, written: float = LONG_AGO) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (written, written))
    return path


def inodes(*paths: Path) -> int:
    return len({path.stat().st_ino for path in paths})


def test_equal_files_of_our_saves(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    steps = [write(tmp_path / f"step-{step}") for step in (1, 2, 3)]
    other = write(tmp_path / "step-4", rows=400)
    files = [data_file(step) for step in steps]
    size = files[0].stat().st_size
    code, out, _ = dcp("dedupe", tmp_path)
    assert code == 0
    assert out.splitlines()[-1] == f"2 of 4 files can be links: --yes frees {2 * size / 1024:.0f} KiB"
    assert inodes(*files) == 3
    assert found(dcp, tmp_path, "--yes")["bytes"] == 2 * size
    assert inodes(*files) == 1
    assert dcp("verify", "-r", tmp_path)[0] == 0
    assert found(dcp, tmp_path, "--yes")["files"] == []
    assert os.access(files[0], os.W_OK)  # saves never write to a file twice
    for step in (steps[0], steps[2]):
        assert dcp("rm", step, "--yes")[0] == 0
        assert not step.exists()
        assert dcp("verify", steps[1])[0] == 0
    assert dcp("rm", steps[1], "--part", "step", "--yes")[0] == 0
    assert dcp("verify", steps[1], other)[0] == 0


def test_du_counts_links_once(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    steps = [write(tmp_path / f"step-{step}") for step in (1, 2)]
    before = json.loads(dcp("du", tmp_path, "--json")[1])
    freed = found(dcp, tmp_path, "--yes")["bytes"]
    after = json.loads(dcp("du", tmp_path, "--json")[1])
    assert before["bytes"] - after["bytes"] == freed == data_file(steps[0]).stat().st_size
    assert all(one["bytes"] - one["own_bytes"] == freed for one in after["checkpoints"])


def test_one_byte_makes_a_file_another(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    files = [data_file(write(tmp_path / f"step-{step}")) for step in range(4)]
    size = files[0].stat().st_size
    for file, offset in zip(files, (64, 100_000, size - 1), strict=False):
        flip(file, offset)
    assert found(dcp, tmp_path)["files"] == []
    for file, offset in zip(files, (64, 100_000, size - 1), strict=False):
        flip(file, offset)
    assert len(found(dcp, tmp_path)["files"]) == 3


def test_files_of_other_programs(tmp_path: Path, dcp: Dcp) -> None:
    data = os.urandom(10_000)
    one = foreign(tmp_path / "a" / "model.safetensors", data)
    two = foreign(tmp_path / "b" / "model-00001.safetensors", data)
    new = foreign(tmp_path / "c" / "model.safetensors", data, written=time.time())
    small = [foreign(tmp_path / name / "s.safetensors", b"small") for name in "ab"]
    (tmp_path / "b" / "x.safetensors").symlink_to(two)
    text = [foreign(tmp_path / name / "notes.txt", data) for name in "ab"]
    code, out, _ = dcp("dedupe", tmp_path, "--yes")
    assert code == 0
    assert f"left alone {new.parent}: files written less than an hour ago" in out
    assert "other programs wrote some of these files" in out
    assert (inodes(one, two), inodes(one, new), inodes(*small), inodes(*text)) == (1, 2, 2, 2)
    assert one.stat().st_mode & 0o222 == 0
    again = foreign(tmp_path / "d" / "model.safetensors", data)
    assert [each["path"] for each in found(dcp, tmp_path, "--yes")["files"]] == [str(again)]
    assert inodes(one, two, again) == 1


def test_files_with_other_owners_or_modes_stay(tmp_path: Path, dcp: Dcp) -> None:
    data = os.urandom(10_000)
    files = [foreign(tmp_path / name / "model.safetensors", data) for name in "ab"]
    files[0].chmod(0o640)
    files[1].chmod(0o644)
    assert found(dcp, tmp_path)["files"] == []


def test_what_is_in_use_is_left_alone(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    steps = {name: write(tmp_path / name) for name in ("free", "saving", "quarantined", "removing", "no-index", "twin")}
    marker = Marker("abc", None, this_process(), "saving", 5)
    LocalStore(steps["saving"]).publish(marker.name, marker.to_bytes())
    (steps["quarantined"] / ".dcp-quarantined.json").write_text("{}")
    (steps["removing"] / ".dcp-removing").touch()
    (steps["no-index"] / ".metadata").unlink()
    said = found(dcp, tmp_path, "--yes")
    assert {Path(path).name for path in said["left"]} == {"saving", "quarantined", "removing", "no-index"}
    assert len(said["files"]) == 1
    assert inodes(*map(data_file, steps.values())) == len(steps) - 1


def test_a_file_that_goes_or_changes_meanwhile(
    tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process acts after the files were compared, before each of them is replaced."""
    steps = {name: write(tmp_path / name) for name in ("kept", "removed", "rewritten", "saving")}
    files = {name: data_file(step) for name, step in steps.items()}
    os.utime(files["kept"], (1, 1))
    compared = dedupe._links

    def meanwhile(search: Any) -> Any:
        found = [*compared(search)]
        shutil.rmtree(steps["removed"])
        flip(files["rewritten"], 100)
        marker = Marker("abc", None, this_process(), "saving", 5)
        LocalStore(steps["saving"]).publish(marker.name, marker.to_bytes())
        return found

    monkeypatch.setattr(dedupe, "_links", meanwhile)
    said = found(dcp, tmp_path, "--yes")
    assert (said["files"], said["failed"]) == ([], {})
    assert {Path(path).name for path in said["left"]} == {files["rewritten"].name, "saving"}
    assert not steps["removed"].exists()
    assert inodes(files["kept"], files["rewritten"], files["saving"]) == 3
    assert not [*tmp_path.rglob("*.tmp")]


def test_a_checkpoint_that_is_being_removed_gets_no_file_back(
    tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, going = (data_file(write(tmp_path / name)) for name in ("kept", "going"))
    os.utime(kept, (1, 1))
    rename = os.replace

    def replace(source: str, target: str) -> None:
        (going.parent / ".metadata").unlink()
        going.unlink()
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    found(dcp, tmp_path, "--yes")
    assert [*going.parent.iterdir()] == []
    assert kept.exists()


def test_links_that_are_refused(tmp_path: Path, dcp: Dcp, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by FAT, at the limit of links, or between two mounts of one file system."""
    for step in (1, 2):
        write(tmp_path / f"step-{step}")

    def link(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    said = found(dcp, tmp_path, "--yes", code=4)
    assert (said["files"], said["bytes"], len(said["failed"])) == ([], 0, 1)
    assert dcp("verify", "-r", tmp_path)[0] == 0


def test_wrong_use(tmp_path: Path, dcp: Dcp) -> None:
    assert dcp("dedupe", tmp_path / "nowhere")[0] == 3
    assert dcp("dedupe", "s3://bucket/runs")[0] == 2
    assert found(dcp, tmp_path)["files"] == []


@pytest.mark.traced
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize(("kind", "number"), [("kill", 1), ("kill", 3), ("enospc", 2), ("eio", 4)])
def test_a_fault_at_each_system_call(
    tmp_path: Path, write: Write, data_file: DataFile, kind: Any, number: int, every: int
) -> None:
    """Each checkpoint stays whole, and the next call of the command completes the work and leaves nothing behind."""
    struck = True
    while struck:
        root = tmp_path / str(number)
        for step in (1, 2, 3):
            write(root / f"step-{step}")
        files = [data_file(root / f"step-{step}") for step in (1, 2, 3)]
        struck = run_traced(
            lambda rank, root=root: run(["dedupe", str(root), "--yes"]), root, fault=Fault(kind, number)
        ).struck
        for file in files:
            assert mark_bytes(file.read_bytes())
            assert index_of(LocalStore(file.parent)).files == (file.name,)
        assert run(["verify", "-r", str(root)]) == 0
        assert run(["dedupe", str(root), "--yes"]) == 0
        assert inodes(*files) == 1
        assert len([path for path in root.rglob("*") if path.is_file()]) == 6
        shutil.rmtree(root)
        number += every
    assert number > 6
