"""Files appear whole or not at all, replace only what they may, and leave nothing behind when a process is killed."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core import DefaultSavePlanner, WriteItem, save
from dcp_format import HuggingFaceStorageWriter, WriteOptions, convert
from dcp_format.content import new_file as module
from dcp_format.content.new_file import new_file
from dcp_io import CheckpointExistsError
from dcp_io.saves.save_files import ProcessIdentity, this_process

DESTINATIONS = ["model.pt", "model.safetensors", "model.hf"]


def no_links(*arguments: Any, **more: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("name", DESTINATIONS)
def test_what_another_made_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, links: bool
) -> None:
    torch.save({"w": torch.ones(5)}, tmp_path / "a.pt")
    taken = tmp_path / name / "model.safetensors" if name.endswith(".hf") else tmp_path / name
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(CheckpointExistsError, match="exists already"):
        convert(tmp_path / "a.pt", tmp_path / name, options=WriteOptions(tick=lambda _: taken.write_text("mine")))
    assert taken.read_text() == "mine"
    assert [*tmp_path.rglob("*.tmp")] == []
    taken.unlink()
    convert(tmp_path / "a.pt", tmp_path / name)
    assert [*tmp_path.rglob("*.tmp")] == []


def gone_process() -> int:
    """The number of a process that has ended."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def left_behind(folder: Path, name: str, owner: ProcessIdentity, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file as a process leaves it that is killed."""
    folder.mkdir(exist_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(module, "this_process", lambda: owner)
        path = folder / module.temporary_name(name)
    path.write_bytes(b"\x40" + bytes(7) + b'{"half')
    return path


@pytest.mark.parametrize("name", DESTINATIONS)
def test_files_of_killed_conversions_are_swept_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    torch.save({"w": torch.ones(5)}, tmp_path / "a.pt")
    me = this_process()
    dead = ProcessIdentity(me.host, me.boot_id, me.pid_namespace, gone_process(), 1)
    away = ProcessIdentity("another host", "its boot", "its namespace", 1, 1)
    folder, file = (tmp_path / name, "model.safetensors") if name.endswith(".hf") else (tmp_path, name)
    swept = [left_behind(folder, file, owner, monkeypatch) for owner in (dead, away)]
    os.utime(swept[1], (time.time() - 25 * 3600,) * 2)
    kept = [
        left_behind(folder, file, me, monkeypatch),
        left_behind(folder, file, away, monkeypatch),
        left_behind(folder, "adapter.safetensors", dead, monkeypatch),
        folder / f".{file}.0123abcd.tmp",
    ]
    kept[-1].write_text("not a name of ours")
    kept.append(left_behind(folder, file, dead, monkeypatch))
    kept[-1].write_text("not what we write")
    convert(tmp_path / "a.pt", tmp_path / name)
    assert not any(path.exists() for path in swept)
    assert all(path.exists() for path in kept)


@pytest.mark.parametrize("consolidated", [False, True])
def test_a_save_sweeps_what_a_killed_one_was_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, consolidated: bool
) -> None:
    me = this_process()
    dead = ProcessIdentity(me.host, me.boot_id, me.pid_namespace, gone_process(), 1)
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=consolidated, enable_consolidation=consolidated)
    name = "model-00001-of-00001.safetensors"
    swept = left_behind(tmp_path, name, dead, monkeypatch)
    running = left_behind(tmp_path, name, me, monkeypatch)
    save({"w": torch.ones(5)}, storage_writer=writer, no_dist=True)
    assert [*tmp_path.rglob("*.tmp")] == [running]
    assert not swept.exists()


def test_a_failing_save_leaves_no_temporary_file(tmp_path: Path) -> None:
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            if write_item.index.fqn == "b":
                assert [*tmp_path.glob("*.tmp")], "the file is not begun: the test shows nothing"
                raise RuntimeError("no more values")
            return super().resolve_data(write_item)

    with pytest.raises(Exception, match="no more values"):
        save(
            {"a": torch.ones(5), "b": torch.ones(5)},
            storage_writer=HuggingFaceStorageWriter(str(tmp_path)),
            planner=Failing(),
            no_dist=True,
        )
    assert [*tmp_path.iterdir()] == []


def test_a_temporary_name_is_of_this_process(tmp_path: Path) -> None:
    with new_file(tmp_path / "x", overwrite=False) as sink:
        sink.write([b"12"])
        with new_file(tmp_path / "x", overwrite=True) as other:  # sweeps, and leaves the first one
            other.write([b"34"])
        (tmp_path / "x").unlink()
    assert (tmp_path / "x").read_bytes() == b"12"


def test_an_index_that_names_a_users_files_makes_no_save_remove_them(tmp_path: Path) -> None:
    mine = {"lora.safetensors": b"mine", "model-part-1.safetensors": b"mine", "train.py": b"mine"}
    for name, data in mine.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "model-00002-of-00002.safetensors").write_text("a text of mine")
    named = [*mine, "model-00002-of-00002.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {n: n for n in named}}))
    for _ in range(2):
        save({"w": torch.ones(5)}, storage_writer=HuggingFaceStorageWriter(str(tmp_path)), no_dist=True)
    assert all((tmp_path / name).read_bytes() == data for name, data in mine.items())
    assert (tmp_path / "model-00002-of-00002.safetensors").read_text() == "a text of mine"
    assert len([*tmp_path.glob("*.safetensors")]) == 4  # the older of the two saves has gone
