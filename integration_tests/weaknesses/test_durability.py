"""Entries B1 to B4 and B8 of stock's measured weaknesses: what a crash or a failed save leaves behind.

What reaches the disk when is seen by watching the calls of `os` that publish a checkpoint.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp
from integration_tests.weaknesses.both import (
    data_files,
    our_load,
    our_save,
    quiet,
    stock,
    stock_load,
    stock_save,
)

Event = tuple[str, str, int]
"""What was done, to which file (its name without what is random), and how many bytes the file had then."""


def _neutral(path: str) -> str:
    name = os.path.basename(path)
    name = re.sub(r"^\.\.metadata\..*", "TEMPORARY", name)
    name = re.sub(r"^\.dcp-save-.*|^\.\.dcp-save-.*", "MARKER", name)
    return re.sub(r"__0_0\..*\.distcp", "DATA", name)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Calls of `os` that make things durable, make them visible, or remove them, in order."""
    seen: list[Event] = []

    def watch(name: str, describe: Callable[..., tuple[str, int]]) -> None:
        real = getattr(os, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, *describe(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, watched)

    def of_descriptor(descriptor: int) -> tuple[str, int]:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return ("FOLDER", 0) if os.path.isdir(path) else (_neutral(path), os.fstat(descriptor).st_size)

    watch("fsync", of_descriptor)
    for name in ("rename", "replace"):
        watch(name, lambda source, target: (f"{_neutral(str(source))} → {_neutral(str(target))}", 0))
    for name in ("unlink", "remove"):
        watch(name, lambda path: (_neutral(str(path)), 0))
    return seen


def _about(seen: list[Event], *files: str) -> list[tuple[str, str]]:
    return [(what, file) for what, file, _ in seen if any(name in file for name in (*files, "FOLDER"))]


def test_b01_contents_are_written_before_they_are_synced(tmp_path: Path, events: list[Event]) -> None:
    stock_save({"a": torch.ones(3)}, tmp_path / "stock")
    synced = [size for what, file, size in events if what == "fsync" and file == ".metadata.tmp"]
    assert synced < [(tmp_path / "stock" / ".metadata").stat().st_size], "stock should show the defect"
    events.clear()
    our_save({"a": torch.ones(3)}, tmp_path / "ours")
    sizes = {file: size for what, file, size in events if what == "fsync"}
    (data,) = data_files(tmp_path / "ours")
    assert sizes["TEMPORARY"] == (tmp_path / "ours" / ".metadata").stat().st_size
    assert sizes["DATA"] == data.stat().st_size > 0


@pytest.mark.parametrize("round_number", [1, 2])
def test_b02_index_is_replaced_in_one_step_after_the_data(
    tmp_path: Path, events: list[Event], round_number: int
) -> None:
    for _ in range(round_number):
        events.clear()
        our_save({"a": torch.ones(3)}, tmp_path / "ours")
    published = _about(events, "DATA", ".metadata", "TEMPORARY")
    start = published.index(("fsync", "DATA"))
    assert published[start : start + 5] == [
        ("fsync", "DATA"),
        ("fsync", "FOLDER"),
        ("fsync", "TEMPORARY"),
        ("replace", "TEMPORARY → .metadata"),
        ("fsync", "FOLDER"),
    ]
    removed = [event for event in published if event[0] in ("unlink", "remove")]
    assert removed == [("unlink", "DATA")] * (round_number - 1)  # the replaced data, after all that
    assert not removed or published.index(removed[0]) >= start + 5


def test_b02_stock_removes_the_index_before_it_has_another(tmp_path: Path, events: list[Event]) -> None:
    for _ in range(2):
        events.clear()
        stock_save({"a": torch.ones(3)}, tmp_path)
    removed = [position for position, event in enumerate(events) if event[1] == ".metadata"]
    renamed = [position for position, event in enumerate(events) if event[0] in ("rename", "replace")]
    assert removed[0] < renamed[0]
    assert ("fsync", "FOLDER") not in _about(events)


class Refusing:
    """An object that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise OSError("refused")


def _killed_mid_data(module: str, state: dict[str, Any], folder: str) -> None:
    library = importlib.import_module(module)

    class Killed(library.DefaultSavePlanner):  # type: ignore[misc, name-defined]
        calls = 0

        def resolve_data(self, write_item: Any) -> Any:
            self.calls += 1
            if self.calls == 2:
                os._exit(9)
            return super().resolve_data(write_item)

    with quiet():
        library.save(state, storage_writer=library.FileSystemWriter(folder), planner=Killed(), no_dist=True)


OLD = {"a": torch.full((1000,), 1.0), "b": torch.full((1000,), 2.0)}
NEW = {"a": torch.full((1000,), 10.0), "b": torch.full((1000,), 20.0)}


def _blank() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(1000), "b": torch.zeros(1000)}


def _holds(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(state[key], value) for key, value in wanted.items())


def test_b03_save_killed_mid_data_leaves_the_old_checkpoint(ranks: Any, tmp_path: Path) -> None:
    for module, save in (("torch.distributed.checkpoint", stock_save), ("dcp_all", our_save)):
        save(OLD, tmp_path / module)
        ranks.run(1, _killed_mid_data, module, NEW, str(tmp_path / module), expect_death=[0])
    try:
        left = stock_load(_blank(), tmp_path / "torch.distributed.checkpoint")
    except stock().CheckpointException:
        left = _blank()
    assert not _holds(left, OLD), "stock should show the defect"
    assert _holds(our_load(_blank(), tmp_path / "dcp_all"), OLD)


def test_b03_value_that_cannot_be_saved_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    bad = {**NEW, "x": Refusing()}
    stock_save(OLD, tmp_path / "stock")
    with pytest.raises(BaseException, match="refused"):
        stock_save(bad, tmp_path / "stock")
    with pytest.raises(stock().CheckpointException):
        stock_load(_blank(), tmp_path / "stock")
    our_save(OLD, tmp_path / "ours")
    before = sorted(path.name for path in (tmp_path / "ours").iterdir())
    with pytest.raises(dcp.DcpError, match="'x' of type Refusing cannot be saved"):
        our_save(bad, tmp_path / "ours")
    assert _holds(our_load(_blank(), tmp_path / "ours"), OLD)
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == before


@pytest.mark.parametrize("failing", ["resolve_data", "write_data", "finish"])
def test_b03_failure_anywhere_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path, failing: str) -> None:
    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if failing == "resolve_data" and write_item.index.fqn == "b":
                raise RuntimeError("failed on purpose")
            return super().resolve_data(write_item)

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            if failing == "write_data":
                raise RuntimeError("failed on purpose")
            return written

        def finish(self, metadata: Any, results: Any) -> None:
            if failing == "finish":
                raise RuntimeError("failed on purpose")
            super().finish(metadata, results)

    our_save(OLD, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="failed on purpose"):
        dcp.save(dict(NEW), storage_writer=Writer(tmp_path), planner=Planner(), no_dist=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert _holds(our_load(_blank(), tmp_path), OLD)


def test_b04_nothing_is_overwritten_that_should_not_be_and_nothing_stays(ranks: Any, tmp_path: Path) -> None:
    our_save(OLD, tmp_path)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match="overwrite=False"):
        our_save(NEW, tmp_path, overwrite=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept
    ranks.run(1, _killed_mid_data, "dcp_all", NEW, str(tmp_path), expect_death=[0])
    (data,) = [path for path in data_files(tmp_path) if path.name in kept]
    assert data.read_bytes() == kept[data.name]
    our_save(OLD, tmp_path, single_file_per_rank=False)
    assert len(data_files(tmp_path)) == 2
    our_save({"a": NEW["a"]}, tmp_path)  # a smaller one: nothing of the larger one, or of the dead one, stays
    assert sorted(map(_neutral, os.listdir(tmp_path))) == [".metadata", "DATA"]


def test_b04_stock_leaves_files_of_earlier_saves(tmp_path: Path) -> None:
    stock_save(OLD, tmp_path, single_file_per_rank=False)
    stock_save({"a": NEW["a"]}, tmp_path)
    assert len(data_files(tmp_path)) == 2, "stock should show the defect"


def test_b08_index_does_not_say_where_it_was_written(tmp_path: Path) -> None:
    secret = tmp_path / "a-place-that-is-nobodys-business"
    stock_save(OLD, secret)
    assert b"nobodys-business" in (secret / ".metadata").read_bytes(), "stock should show the defect"
    for collectives in (True, False):
        dcp.save(dict(OLD), checkpoint_id=secret / "ours", no_dist=True, use_collectives=collectives)
        for path in (secret / "ours").glob("*.metadata"):
            data = path.read_bytes()
            assert b"nobodys-business" not in data, path
            assert b"pathlib" not in data, path
            assert str(tmp_path).encode() not in data, path
