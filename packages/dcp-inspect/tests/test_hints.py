"""Errors say what is at a path instead, and what a name may mean."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Dcp = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]
DataFile = Callable[[Path], Path]


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write) -> Path:
    monkeypatch.chdir(tmp_path)
    write(Path("good"))
    return tmp_path


@pytest.mark.usefixtures("good")
def test_a_part_of_names_is_told_its_pattern(dcp: Dcp) -> None:
    assert dcp("show", "good", "model")[2].endswith(
        "no name in good matches 'model'; 2 values are below it: `dcp show good 'model.*'`; `dcp show good` lists all\n"
    )
    said = dcp("cat", "good", "model")[2]
    assert "good holds no value 'model'; 1 value is below it: `dcp show good 'model.*'`" in said
    assert "matches 'stepp'; near it: step; `dcp show good` lists all" in dcp("show", "good", "stepp")[2]
    assert "matches 'zz' or 'yy'; `dcp show good` lists all" in dcp("show", "good", "zz", "yy")[2]


@pytest.mark.parametrize("command", ["show", "cat", "convert", "diff"])
def test_a_data_file_is_told_its_checkpoint(command: str, good: Path, dcp: Dcp, data_file: DataFile) -> None:
    if command == "convert":
        pytest.importorskip("dcp_format")
    file = data_file(good / "good").relative_to(good)
    more = {"show": (), "cat": ("step",), "convert": ("out",), "diff": ("good",)}[command]
    code, out, err = dcp(command, file, *more)
    assert (code, out) == (3, "")
    assert err == f"dcp: {file} is a data file of the checkpoint in good: `dcp show good` shows it\n"


@pytest.mark.parametrize("command", ["verify", "plan"])
def test_other_formats_are_told_who_reads_them(command: str, good: Path, dcp: Dcp) -> None:
    (good / "export.hf").mkdir()
    (good / "export.hf" / "model.safetensors").write_bytes(b"")
    more = ("--world", 2) if command == "plan" else ()
    code, _, err = dcp(command, "export.hf", *more)
    assert code == 5
    assert "holds safetensors files, not a checkpoint; `dcp show`, `dcp cat`, `dcp diff` and `dcp convert` read" in err


def test_convert_says_what_is_at_a_folder_instead(good: Path, dcp: Dcp) -> None:
    pytest.importorskip("dcp_format")
    (good / "runs").mkdir()
    shutil.copytree("good", "runs/step-1")
    said = dcp("convert", "runs", "out")[2]
    assert "`dcp ls runs` lists the checkpoint below it, the newest complete one is runs/step-1" in said
    (good / "runs" / "step-1" / ".metadata").unlink()
    code, _, err = dcp("convert", "runs/step-1", "out")
    assert (code, "holds an unfinished save and no checkpoint" in err) == (3, True)
    (good / "empty.pt").write_bytes(b"")
    code, _, err = dcp("convert", "empty.pt", "out")
    assert (code, err) == (5, "dcp: empty.pt is empty: a write to it may not have finished\n")


@pytest.mark.usefixtures("good")
def test_equal_keys_are_not_called_equal_values(dcp: Dcp) -> None:
    assert dcp("diff", "good", "good")[1] == "equal: 4 values\n"
    assert dcp("diff", "good", "good", "--keys-only")[1] == "equal: 4 values, by name, dtype and shape\n"


@pytest.mark.parametrize("command", ["show", "plan", "diff"])
def test_errors_of_a_damaged_index_name_its_folder(command: str, good: Path, dcp: Dcp) -> None:
    index = good / "good" / ".metadata"
    index.write_bytes(index.read_bytes()[:-40])
    more = {"show": (), "plan": ("--world", 2), "diff": ("good",)}[command]
    code, out, err = dcp(command, "good", *more)
    assert (code, out) == (4, "")
    assert err.startswith("dcp: good: the index")
