"""Where the plug-in saves, loads and removes: full disks, relative paths, odd names, saves that were not completed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_io
from dcp_core import CheckpointNotFoundError, CorruptCheckpointError, DcpError

pytest.importorskip("lightning", reason="needs Lightning: `nox -s frameworks` installs it")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on speed


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def load(path: Any) -> Any:
    from dcp_lightning import DcpCheckpointIO

    return DcpCheckpointIO().load_checkpoint(path)


def remove(path: Any) -> None:
    from dcp_lightning import DcpCheckpointIO

    DcpCheckpointIO().remove_checkpoint(path)


@pytest.mark.parametrize("background", [None, "thread"])
@pytest.mark.parametrize("there", ["folder", "file", "nothing"])
def test_a_full_disk_leaves_what_there_was(
    background: str | None,
    there: str,
    tmp_path: Path,
    fill_disk: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dcp_lightning import DcpCheckpointIO

    place = tmp_path / "last.ckpt"
    if there == "folder":
        DcpCheckpointIO().save_checkpoint({"step": 1, "w": torch.ones(9)}, place)
    elif there == "file":
        torch.save({"step": 1}, place)
    plugin = DcpCheckpointIO(background=background)
    fill_disk()
    with pytest.raises(OSError, match="No space left on device"):  # noqa: PT012 - either may raise
        plugin.save_checkpoint({"step": 2, "w": torch.ones(9)}, place)
        plugin.teardown()
    monkeypatch.undo()
    if there == "nothing":
        with pytest.raises(CheckpointNotFoundError, match=r"last\.ckpt"):
            plugin.load_checkpoint(place)
    else:
        assert plugin.load_checkpoint(place)["step"] == 1
    plugin.save_checkpoint({"step": 3}, place)
    plugin.teardown()
    assert plugin.load_checkpoint(place) == {"step": 3}
    assert names(tmp_path) == ["last.ckpt"]


def test_relative_paths_are_those_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dcp_lightning import DcpCheckpointIO

    monkeypatch.chdir(tmp_path)
    plugin = DcpCheckpointIO(background="thread")
    plugin.save_checkpoint({"step": 1}, "run/old.ckpt")
    plugin.save_checkpoint({"step": 2}, "run/./new.ckpt")
    plugin._pending.append(running := Future())
    plugin.remove_checkpoint("run/old.ckpt")
    plugin.remove_checkpoint("run/new.ckpt")
    plugin._pending.remove(running)
    plugin.save_checkpoint({"step": 3}, f"{tmp_path}/run//new.ckpt")  # the same place: not to be removed any more
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    plugin.teardown()
    assert names(tmp_path / "run") == ["new.ckpt"]
    assert plugin.load_checkpoint("../run/new.ckpt") == {"step": 3}


@pytest.mark.parametrize("name", ["ünï cødé.ckpt", "a=b,c=[1].ckpt", "x" * 200, "line\nbreak.ckpt", "-dash", "~tilde"])
def test_odd_names(name: str, tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO

    plugin = DcpCheckpointIO(background="thread")
    plugin.save_checkpoint({"step": 1}, tmp_path / name)
    assert plugin.load_checkpoint(tmp_path / name) == {"step": 1}
    plugin.remove_checkpoint(tmp_path / name)
    plugin.teardown()
    assert names(tmp_path) == []


@pytest.mark.parametrize("path", ["", "s3:/bucket/run"])
def test_paths_that_name_no_place(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dcp_lightning import DcpCheckpointIO

    monkeypatch.chdir(tmp_path)
    for act in (lambda: DcpCheckpointIO().save_checkpoint({"step": 1}, path), lambda: load(path), lambda: remove(path)):
        with pytest.raises(DcpError):
            act()
    assert names(tmp_path) == []


def test_a_folder_removed_while_a_save_is_in_the_background(tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO

    plugin = DcpCheckpointIO(background="thread")
    plugin.save_checkpoint({"step": 1}, tmp_path / "run" / "old.ckpt")
    plugin.teardown()
    shutil.rmtree(tmp_path / "run")
    plugin.remove_checkpoint(tmp_path / "run" / "old.ckpt")
    plugin.save_checkpoint({"step": 2}, tmp_path / "run" / "new.ckpt")
    plugin.teardown()
    assert load(tmp_path / "run" / "new.ckpt") == {"step": 2}


def test_only_files_of_a_checkpoint_are_removed(tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO

    DcpCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "one.ckpt")
    (tmp_path / "one.ckpt" / "notes.txt").write_text("mine")
    remove(tmp_path / "one.ckpt")
    assert names(tmp_path / "one.ckpt") == ["notes.txt"]


def test_two_trainers_that_save_to_one_place(tmp_path: Path) -> None:
    from dcp_fs import FileSystemWriter
    from dcp_lightning import DcpCheckpointIO

    class Waiting(FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            entered.set()
            assert leave.wait(60)
            super().finish(metadata, results)

    entered, leave, first = threading.Event(), threading.Event(), DcpCheckpointIO(background="thread")
    first.storage = lambda place, *others: Waiting(place)  # type: ignore[method-assign]
    first.save_checkpoint({"step": 1}, tmp_path / "last.ckpt")
    assert entered.wait(60)
    with pytest.raises(dcp_io.SaveInProgressError, match=r"last\.ckpt"):
        DcpCheckpointIO().save_checkpoint({"step": 2}, tmp_path / "last.ckpt")
    leave.set()
    first.teardown()
    assert load(tmp_path / "last.ckpt") == {"step": 1}


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO

    DcpCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "one.ckpt")
    (index,) = (tmp_path / "one.ckpt").glob("*.metadata")
    index.write_bytes(index.read_bytes()[:-40])
    with pytest.raises(CorruptCheckpointError, match="restore the file from a copy"):
        load(tmp_path / "one.ckpt")


def begin_save(place: Any) -> None:
    """Leave what a save leaves that is killed before its index is there."""
    store = dcp_io.open_store(place)
    store.make()
    store.publish("__0_0.distcp", b"data")


@pytest.mark.parametrize("storage", ["folder", "memory"])
@pytest.mark.parametrize("name", ["last.ckpt", "last-v1.ckpt", "hpc_ckpt_3.ckpt"])
def test_the_newest_complete_one_is_loaded_instead_of_an_unfinished_last_one(
    storage: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from dcp_lightning import DcpCheckpointIO

    root = str(tmp_path) if storage == "folder" else f"memory://{tmp_path}"
    begin_save(f"{root}/{name}")
    with pytest.raises(CheckpointNotFoundError, match=name):
        load(f"{root}/{name}")
    for step in (1, 2):
        DcpCheckpointIO().save_checkpoint({"step": step}, f"{root}/epoch=0-step={step}.ckpt")
    assert load(f"{root}/{name}") == {"step": 2}
    assert f"{name} was not completed: loading" in caplog.text
    DcpCheckpointIO().save_checkpoint({"step": 0}, f"{root}/{name}")
    assert load(f"{root}/{name}") == {"step": 0}


def test_another_checkpoint_is_never_loaded_for_one_that_was_named(tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO

    DcpCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "epoch=0-step=1.ckpt")
    begin_save(tmp_path / "epoch=0-step=2.ckpt")
    for name in ("epoch=0-step=2.ckpt", "last.ckpt"):  # the latter is not there at all
        with pytest.raises(CheckpointNotFoundError, match=name):
            load(tmp_path / name)


def test_a_file_is_loaded_before_what_an_older_save_has_moved_aside(tmp_path: Path) -> None:
    torch.save({"step": 1}, tmp_path / "last.ckpt.replaced")
    torch.save({"step": 2}, tmp_path / "last.ckpt")
    assert load(tmp_path / "last.ckpt") == {"step": 2}
