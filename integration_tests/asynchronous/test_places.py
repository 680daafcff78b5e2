"""Where a save goes, and what its metadata says, is decided at the call: whatever changes before it is carried out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_fsspec import FsspecWriter
from dcp_manager import CheckpointManager
from dcp_ranks.testing.ranks import RankPool
from integration_tests.asynchronous.other_writers import EnvironmentWriter, StockStyleWriter

KINDS = ["thread", "process"]
STATE = {"w": torch.ones(3)}


@pytest.fixture(scope="module", params=KINDS)
def saver(request: pytest.FixtureRequest) -> Iterator[dcp.AsyncSaver]:
    """One whose worker was started in another folder than the tests'."""
    with dcp.AsyncSaver(request.param) as made:
        made.warm_up()
        yield made


PLACES: dict[str, Callable[[], dict[str, Any]]] = {
    "path": lambda: {"checkpoint_id": "step"},
    "Path": lambda: {"checkpoint_id": Path("step")},
    "file URI": lambda: {"checkpoint_id": "file://step"},
    "local URI": lambda: {"checkpoint_id": "step", "storage_writer": FsspecWriter("local://elsewhere")},
    "dots": lambda: {"checkpoint_id": "./x/../step"},
    "writer": lambda: {"storage_writer": dcp.FileSystemWriter("step")},
    "writer of a URI": lambda: {"storage_writer": FsspecWriter("file://step")},
    "writer and path": lambda: {"storage_writer": dcp.FileSystemWriter("elsewhere"), "checkpoint_id": "step"},
    "writer of another library": lambda: {"storage_writer": StockStyleWriter("elsewhere"), "checkpoint_id": "step"},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_a_relative_id_means_the_folder_of_the_call(
    saver: dcp.AsyncSaver, place: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for each in (before, after):
        each.mkdir()
    monkeypatch.chdir(before)
    arguments = place()
    hold = saver._backend.run
    monkeypatch.setattr(saver._backend, "run", lambda job: (os.chdir(after), hold(job))[1])
    future: Any = saver.save(STATE, **arguments)
    found = future.result()
    assert Path.cwd() == after
    assert os.listdir(before) == ["step"]
    assert not os.listdir(after)
    assert list(found.state_dict_metadata) == ["w"]  # read here, perhaps, and only now
    assert torch.equal(dcp.load_keys(checkpoint_id=before / "step")["w"], STATE["w"])


def test_the_metadata_is_that_of_its_save_though_the_writer_went_on(
    saver: dcp.AsyncSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    writer = dcp.FileSystemWriter("first")
    first: Any = saver.save({"one": torch.ones(1)}, storage_writer=writer)
    one = first.result()
    writer.reset("second")
    second: Any = saver.save({"two": torch.ones(1)}, storage_writer=writer)
    two = second.result()
    assert [*one.state_dict_metadata, *two.state_dict_metadata] == ["one", "two"]


def test_the_environment_is_that_of_the_call(
    saver: dcp.AsyncSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of credentials, for example, that a trainer takes from somewhere after it has made its saver."""
    for number in (1, 2, None):
        if number is None:
            monkeypatch.delenv("DCP_TEST_SECRET")
        else:
            monkeypatch.setenv("DCP_TEST_SECRET", str(number))
        future: Any = saver.save(STATE, storage_writer=EnvironmentWriter(tmp_path / str(number)))
        future.result()
        assert (tmp_path / str(number) / "seen").read_text() == str(number)


def test_a_removed_working_folder_is_named(
    saver: dcp.AsyncSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(dcp.CheckpointNotFoundError, match="working directory that was removed"):
        saver.save(STATE, checkpoint_id="step")
    future: Any = saver.save(STATE, checkpoint_id=tmp_path / "step")
    future.result()


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_a_manager_stays_under_its_root(kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for each in (before, after):
        each.mkdir()
    monkeypatch.chdir(before)
    saver = None if kind is None else dcp.AsyncSaver(kind)
    with CheckpointManager("run", saver=saver) as manager:
        monkeypatch.chdir(after)
        manager.maybe_save(1, STATE)
        manager.wait()
        assert [record.step for record in manager.checkpoints()] == [1]
        found = {"w": torch.zeros(3)}
        assert manager.restore(found) is not None
    if saver is not None:
        saver.close()
    assert torch.equal(found["w"], STATE["w"])
    assert not os.listdir(after)


def _twice_by_one_writer(root: str) -> list[list[str]]:
    os.chdir(root)
    writer = dcp.FileSystemWriter("first")
    one = dcp.save({"one": torch.ones(1)}, storage_writer=writer)
    two = dcp.save({"two": torch.ones(1)}, storage_writer=writer, checkpoint_id="second")
    dist.barrier()
    os.chdir("/")
    return [list(each.state_dict_metadata) for each in (one, two)]


def test_ranks_that_look_late_see_the_metadata_of_each_save(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, _twice_by_one_writer, str(tmp_path)) == [[["one"], ["two"]]] * 2
