"""Section D of stock's measured weaknesses: hostile, damaged and unsuitable input, and what is said about it."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp
from dcp_core.objects.object_bytes import UnloadableObjectWarning
from dcp_io import LocalStore
from integration_tests.weaknesses.both import (
    data_files,
    edit_stock_metadata,
    find_bytes,
    flip,
    our_load,
    our_save,
    stock,
    stock_load,
    stock_save,
)

STATE: dict[str, Any] = {"weight": torch.arange(1.0, 4097.0), "bias": torch.arange(2.0, 4098.0), "step": 7}


def _blank() -> dict[str, Any]:
    return {"weight": torch.zeros(4096), "bias": torch.zeros(4096), "step": 0}


class Hostile:
    """Unpickling it makes a file: the least that running code can do."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_d_hostile_metadata_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for writer, folder in ((stock_save, tmp_path / "stock"), (our_save, tmp_path / "ours")):
        writer(STATE, folder)
    hostile = pickle.dumps(Hostile(mark))
    for folder in (tmp_path / "stock", tmp_path / "ours"):
        (folder / ".metadata").write_bytes(hostile)
        with pytest.raises(dcp.UnsafeCheckpointError, match=r"(posix|nt|os)\.mkdir"):
            our_load(_blank(), folder)
        assert not mark.exists()
    with pytest.raises(BaseException, match=r"\S"):
        stock_load(_blank(), tmp_path / "stock")
    assert mark.exists(), "stock should show the defect"


def test_d_hostile_object_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    stock_save({"step": Hostile(mark)}, tmp_path / "stock")
    with pytest.warns(UnloadableObjectWarning, match=r"'step' would not load back.*mkdir"):
        our_save({"step": Hostile(mark)}, tmp_path / "ours")
    for folder in (tmp_path / "stock", tmp_path / "ours"):
        with pytest.raises(dcp.UnsafeCheckpointError, match=r"'step' names (posix|nt|os)\.mkdir"):
            our_load({"step": 0}, folder)
    assert not mark.exists()
    stock_load({"step": 0}, tmp_path / "stock")
    assert mark.exists(), "stock should show the defect"


def test_d_paths_do_not_leave_the_folder(tmp_path: Path) -> None:
    stock_save(STATE, tmp_path / "stock")
    (data,) = data_files(tmp_path / "stock")
    shutil.move(data, tmp_path / "elsewhere")

    def lead_out(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../elsewhere"

    edit_stock_metadata(tmp_path / "stock", lead_out)
    assert stock_load(_blank(), tmp_path / "stock")["step"] == 7, "stock should show the defect"
    with pytest.raises(dcp.UnsafeCheckpointError, match=r"\.\./elsewhere"):
        our_load(_blank(), tmp_path / "stock")


@pytest.mark.parametrize("layout", ["torch", "raw"])
def test_d_swapped_files_are_noticed(tmp_path: Path, layout: str) -> None:
    our_save({"a": STATE["weight"], "b": STATE["bias"]}, tmp_path, layout=layout, single_file_per_rank=False)
    first, second = data_files(tmp_path)
    assert first.stat().st_size == second.stat().st_size
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    with pytest.raises(dcp.CorruptCheckpointError) as caught:
        our_load({"a": torch.zeros(4096), "b": torch.zeros(4096)}, tmp_path)
    assert caught.value.key in ("a", "b")
    assert caught.value.file in (first.name, second.name)


# What is done to the only data file, and the error of ours that says so.
DAMAGES: dict[str, tuple[Callable[[Path], Any], type[Exception]]] = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), dcp.CorruptCheckpointError),
    "empty": (lambda path: os.truncate(path, 0), dcp.CorruptCheckpointError),
    "missing": (lambda path: path.unlink(), dcp.CheckpointNotFoundError),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("writer", ["stock", "torch", "raw"])
def test_d_damaged_data_files_are_named(tmp_path: Path, writer: str, damage: str) -> None:
    if writer == "stock":
        stock_save(STATE, tmp_path)
    else:
        our_save(STATE, tmp_path, layout=writer, thread_count=1)
    (path,) = data_files(tmp_path)
    do_damage, wanted = DAMAGES[damage]
    do_damage(path)
    with pytest.raises(wanted, match=path.name) as caught:
        our_load(_blank(), tmp_path)
    if isinstance(caught.value, dcp.CorruptCheckpointError):
        assert caught.value.key in STATE
        assert caught.value.offset is not None


def test_d_damaged_archive_of_stock_is_named(tmp_path: Path) -> None:
    stock_save({"odd name": STATE["weight"]}, tmp_path)
    path, at = find_bytes(tmp_path, b"_rebuild_tensor_v2")
    flip(path, at + 3, 0x80)
    with pytest.raises(stock().CheckpointException) as told:
        stock_load({"odd name": torch.zeros(4096)}, tmp_path)
    assert "odd name" not in str(told.value), "stock should not say which tensor it is"
    with pytest.raises(dcp.CorruptCheckpointError) as caught:
        our_load({"odd name": torch.zeros(4096)}, tmp_path)
    assert (caught.value.file, caught.value.key) == (path.name, "odd name")


@pytest.mark.parametrize("writer", ["stock", "ours"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "garbled", "zeroed-tail"])
def test_d_damaged_metadata_is_named(tmp_path: Path, writer: str, damage: str) -> None:
    (stock_save if writer == "stock" else our_save)(STATE, tmp_path)
    path = tmp_path / ".metadata"
    data = path.read_bytes()
    damaged = {
        "truncated": data[: len(data) * 2 // 3],
        "empty": b"",
        "garbled": bytes(byte ^ 0x5A for byte in data),
        "zeroed-tail": data[:-40] + bytes(40),
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(dcp.CorruptCheckpointError, match=r"\.metadata"):
        our_load(_blank(), tmp_path)


def test_d_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    our_save(STATE, tmp_path)
    template = {"wieght": torch.zeros(4096), "bias": torch.zeros(7), "stp": 0, "step": 0}
    with pytest.raises(dcp.LoadMismatchError) as caught:
        our_load(template, tmp_path)
    assert {(problem.key, problem.kind) for problem in caught.value.problems} == {
        ("wieght", "missing"), ("stp", "missing"), ("bias", "shape"),
    }  # fmt: skip
    text = str(caught.value)
    for part in ("did you mean 'weight'", "Size mismatch between saved (4096,) and current (7,) for bias"):
        assert part in text
    assert template["step"] == 0
    with pytest.raises(stock().CheckpointException) as told:
        stock_load({"wieght": torch.zeros(4096), "stp": 0}, tmp_path)
    assert not ("wieght" in str(told.value) and "stp" in str(told.value)), "stock should tell only the first"


BAD_VALUES: dict[str, Callable[[], Any]] = {
    "lambda": lambda: lambda: 0,
    "meta": lambda: torch.empty(2, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("kind", BAD_VALUES)
def test_d_values_that_cannot_be_saved_fail_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    state = {"good": torch.ones(4), "deep": {"bad": BAD_VALUES[kind]()}}
    with pytest.raises(BaseException, match=r"\S"):
        stock_save(state, tmp_path / "stock")
    assert data_files(tmp_path / "stock"), "stock should show the defect"
    opened: list[str] = []
    monkeypatch.setattr(LocalStore, "create", lambda _, name, **__: opened.append(name))
    with pytest.raises((TypeError, ValueError), match=r"deep\.bad") as caught:
        our_save(state, tmp_path / "ours")
    assert isinstance(caught.value, dcp.DcpError)
    assert opened == []
    assert not (tmp_path / "ours").exists() or not list((tmp_path / "ours").iterdir())


class Labelled(torch.Tensor):
    """A subclass without behaviour of its own."""


def test_d_tensor_subclass_loads_back(tmp_path: Path) -> None:
    value = torch.arange(6.0).as_subclass(Labelled)
    stock_save({"x": value}, tmp_path / "stock")
    with pytest.raises(stock().CheckpointException):
        stock_load({"x": torch.zeros(6)}, tmp_path / "stock")
    our_save({"x": value}, tmp_path / "ours")
    assert torch.equal(our_load({"x": torch.zeros(6)}, tmp_path / "ours")["x"], torch.arange(6.0))
    assert torch.equal(stock_load({"x": torch.zeros(6)}, tmp_path / "ours")["x"], torch.arange(6.0))


def test_d_checkpoint_exception_is_an_exception_and_says_what_failed() -> None:
    assert not issubclass(stock().CheckpointException, Exception), "stock should show the defect"
    assert issubclass(dcp.CheckpointException, Exception)
    text = str(dcp.CheckpointException("phase 'write' did not succeed", {1: (OSError("full"), "OSError: full")}))
    for part in ("phase 'write'", "rank 1", "OSError: full"):
        assert part in text
