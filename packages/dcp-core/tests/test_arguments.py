"""Arguments of saves and loads: ids that are tied to the working folder, and storages and planners of other classes."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core import (
    CheckpointNotFoundError,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlanner,
    OperationError,
    SavePlanner,
    StorageReader,
    StorageWriter,
    load,
    save,
)
from dcp_core.arguments import absolute_id, absolute_id_for, adopted
from dcp_ranks.testing.ranks import RankPool
from integration_tests.kits.memory import MemoryReader, MemoryWriter
from integration_tests.kits.memory_store import OBJECTS


class Passing:
    """An object of no known class, which passes some calls on."""

    passed: tuple[str, ...] = ()

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).passed:
            raise AttributeError(name)
        return getattr(self.inner, name)


class Writer(Passing):
    passed = (
        *("reset", "storage_meta", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan"),
        *("write_data", "finish", "validate_checkpoint_id"),
    )


class Reader(Passing):
    passed = (
        *("reset", "read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan"),
        *("read_data", "validate_checkpoint_id"),
    )


class Planner(Passing):
    passed = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data")


class Loader(Passing):
    passed = (
        *("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"),
        *("load_bytes", "resolve_bytes", "resolve_tensor", "commit_tensor"),
    )


@pytest.fixture(autouse=True)
def _no_objects() -> Any:
    yield
    OBJECTS.clear()


def test_a_round_trip_with_required_methods_alone() -> None:
    state = {"a": torch.arange(12.0).reshape(3, 4), "tied": {"x": torch.ones(2)}, "step": 3}
    writer: Any = Writer(MemoryWriter("a"))
    metadata = save(state, storage_writer=writer, planner=Planner(DefaultSavePlanner()), no_dist=True)  # type: ignore[arg-type]
    assert set(metadata.state_dict_metadata) == {"a", "tied.x", "step"}
    found: dict[str, Any] = {"a": torch.zeros(3, 4), "tied": {"x": torch.zeros(2)}, "step": 0}
    reader: Any = Reader(MemoryReader("a"))
    report = load(found, storage_reader=reader, planner=Loader(DefaultLoadPlanner()), no_dist=True)  # type: ignore[arg-type]
    assert report.loaded == ("a", "step", "tied.x")
    assert torch.equal(found["a"], state["a"])
    assert found["step"] == 3


def test_what_it_lacks_is_as_in_our_class() -> None:
    writer = adopted(Writer(MemoryWriter("a")), StorageWriter)
    assert isinstance(writer, StorageWriter)
    assert writer.checkpoint_id is None
    assert [writer.reads_back, writer.stores_aliases, writer.ids_are_paths] == [False] * 3
    assert writer.abort(OSError()) is None  # type: ignore[func-returns-value]
    planner = adopted(Planner(DefaultSavePlanner()), SavePlanner)
    assert isinstance(planner, SavePlanner)
    assert (planner.plan_key(), planner.plain_values()) == (None, None)
    reader = adopted(Reader(MemoryReader("a")), StorageReader)
    assert isinstance(reader, StorageReader)
    assert (reader.bytes_read, reader.unverified_keys) == (None, ())
    loader = adopted(Loader(DefaultLoadPlanner()), LoadPlanner)
    assert loader is not None
    assert (loader.local_load, loader.allow_globals, loader.trust_objects) == (None, (), False)


def test_a_required_method_that_is_missing_is_named() -> None:
    """It must not be one that does nothing: nothing would be saved."""
    lacks: Any = type("Lacks", (Writer,), {"passed": tuple(name for name in Writer.passed if name != "finish")})
    with pytest.raises(AttributeError, match="finish"):
        save({"a": torch.ones(2)}, storage_writer=lacks(MemoryWriter("a")), no_dist=True)
    with pytest.raises(AttributeError, match="resolve_tensor"):
        adopted(object(), LoadPlanner).resolve_tensor  # noqa: B018
    with pytest.raises(AttributeError):
        save({"a": torch.ones(2)}, storage_writer=5, no_dist=True)  # type: ignore[arg-type]


def test_an_attribute_that_changes_later_is_seen() -> None:
    class Named(Writer):
        checkpoint_id = "before"

    named: Any = Named(MemoryWriter("a"))
    writer = adopted(named, StorageWriter)
    assert writer is not None
    named.checkpoint_id = "after"
    assert writer.checkpoint_id == "after"


def test_copies_and_pickles_are_of_the_object() -> None:
    given: Any = Writer(MemoryWriter("a"))
    writer = adopted(given, StorageWriter)
    assert type(pickle.loads(pickle.dumps(writer))) is Writer
    assert type(copy.copy(writer)) is Writer


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


@pytest.mark.parametrize("given", ["file://localhost/a/b", "FILE://LOCALHOST/a/b"])
def test_this_host_in_a_uri_is_no_directory(given: str) -> None:
    assert absolute_id(given) == given


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
    assert absolute_id_for(adopted(storage, StorageWriter), given) == (
        expected and expected.replace(HERE, str(tmp_path))
    )


def test_a_working_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(CheckpointNotFoundError, match="'step' is relative to a working directory that was removed"):
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
    except OperationError as error:
        return str(error)
    return "nobody minded"


@pytest.mark.parametrize("operation", ["save", "load"])
def test_ranks_in_other_folders_do_not_mean_one_checkpoint(ranks: RankPool, tmp_path: Path, operation: str) -> None:
    for told in ranks.run(2, _in_other_folders, str(tmp_path), operation):
        assert "different checkpoint ids" in told
        assert all(f"{tmp_path}/{rank}/step" in told for rank in range(2))
