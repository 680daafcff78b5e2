"""Which ids are tied to the working folder, and when."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core import CheckpointNotFoundError, RankDisagreementError, load, save
from dcp_core.storage.checkpoint_ids import absolute_id, absolute_id_for
from dcp_core.testing.memory import MemoryReader, MemoryWriter
from dcp_core.testing.memory_store import OBJECTS
from dcp_ranks.testing.ranks import RankPool

HERE = "<here>"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("step", f"{HERE}/step"),
        (Path("a/step"), Path(f"{HERE}/a/step")),
        ("./a/../step/", f"{HERE}/step"),
        ("~/step", f"{HERE}/~/step"),
        ("file://step", f"file://{HERE}/step"),
        ("local://step", f"local://{HERE}/step"),
        ("simplecache::file://step", f"simplecache::file://{HERE}/step"),
        ("/a/step", "/a/step"),
        (Path("/a/step"), Path("/a/step")),
        ("file:///a/step", "file:///a/step"),
        ("local://~/step", "local://~/step"),
        ("s3://bucket/step", "s3://bucket/step"),
        ("memory://step", "memory://step"),
    ],
)
def test_relative_paths_alone_are_made_absolute(
    given: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = absolute_id(given)
    assert str(found) == str(expected).replace(HERE, str(tmp_path))
    assert isinstance(found, type(given))


def test_an_absolute_id_stays_the_very_object() -> None:
    given = Path("/a/step")
    assert absolute_id(given) is given


class Paths:
    ids_are_paths = True
    checkpoint_id = "as given"
    absolute_id = "/where/it/is"


class StockStyle:
    """As a writer of `torch.distributed.checkpoint` is."""

    path = Path("somewhere")


class Names:
    ids_are_paths = False
    checkpoint_id = "a name"


@pytest.mark.parametrize(
    ("storage", "given", "expected"),
    [
        (None, "step", f"{HERE}/step"),
        (Paths(), "step", f"{HERE}/step"),
        (StockStyle(), "step", f"{HERE}/step"),
        (Names(), "step", "step"),
        (object(), "step", "step"),
        (Paths(), None, "/where/it/is"),
        (Names(), None, "a name"),
        (object(), None, None),
        (None, None, None),
    ],
)
def test_the_storage_says_whether_ids_are_paths(
    storage: Any, given: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_id_for(storage, given) == (expected and expected.replace(HERE, str(tmp_path)))


def test_a_working_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(CheckpointNotFoundError, match="'step' is relative to a working folder that has been removed"):
        absolute_id("step")
    assert absolute_id("/step") == "/step"


class FolderWriter(MemoryWriter):
    """Its ids are paths."""

    ids_are_paths = True


class FolderReader(MemoryReader):
    ids_are_paths = True


@pytest.mark.parametrize("by_reset", [False, True])
def test_a_storage_stays_where_it_was_given(by_reset: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a constructor and of `reset`: the folder of then, and the id as it was given for all to see."""
    OBJECTS.clear()  # what other tests of this process left
    first, second = tmp_path / "first", tmp_path / "second"
    for each in (first, second):
        each.mkdir()
    monkeypatch.chdir(first)
    writer = FolderWriter("/elsewhere" if by_reset else "step")
    reader = FolderReader("/elsewhere" if by_reset else "step")
    if by_reset:
        writer.reset("step")
        reader.reset("step")
    monkeypatch.chdir(second)
    writer.reset()
    reader.reset()
    metadata = save({"w": torch.ones(2)}, storage_writer=writer)
    assert (writer.checkpoint_id, reader.checkpoint_id) == ("step", "step")
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == "step"
    assert sorted({path.rpartition("/")[0] for path in OBJECTS}) == [f"{first}/step"]
    found = {"w": torch.zeros(2)}
    load(found, storage_reader=reader)
    assert found["w"].tolist() == [1, 1]
    assert list(writer.published_metadata().state_dict_metadata) == ["w"]
    OBJECTS.clear()


def _in_other_folders(root: str, operation: str) -> str:
    rank = torch.distributed.get_rank()
    folder = os.path.join(root, str(rank))
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    try:
        if operation == "save":
            save({"w": torch.ones(2)}, checkpoint_id="step", storage_writer=FolderWriter("x"))
        else:
            load({"w": torch.ones(2)}, checkpoint_id="step", storage_reader=FolderReader("x"))
    except RankDisagreementError as error:
        return str(error)
    return "nobody minded"


@pytest.mark.parametrize("operation", ["save", "load"])
def test_ranks_in_other_folders_do_not_mean_one_checkpoint(ranks: RankPool, tmp_path: Path, operation: str) -> None:
    for told in ranks.run(2, _in_other_folders, str(tmp_path), operation):
        assert "different checkpoint ids" in told
        assert all(f"{tmp_path}/{rank}/step" in told for rank in range(2))
