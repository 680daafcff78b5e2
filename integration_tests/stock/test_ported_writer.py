"""Storages and planners written for stock and ported by their import line: what they wrote loads in stock and in us."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

STOCK = "torch.distributed.checkpoint"
OURS = "dcp_all"
FULL = torch.arange(30, dtype=torch.float32).reshape(6, 5)

# What a process knows that has never heard of us: it loads the folders that it reads the names of.
STRANGER = """
import sys, torch, traceback, warnings
warnings.simplefilter("ignore")
import torch.distributed.checkpoint as dcp

def check(folder, dtype):
    state = {"model": {"w": torch.zeros(6, 5, dtype=dtype), "b": torch.zeros(3, dtype=dtype)}, "step": 0, "names": []}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert torch.equal(state["model"]["w"], torch.arange(30.0).reshape(6, 5).to(dtype)), state
    assert torch.equal(state["model"]["b"], torch.ones(3, dtype=dtype)), state
    assert (state["step"], state["names"]) == (7, ["a", "b"]), state
    assert not [name for name in sys.modules if name.startswith("dcp_")]

for line in sys.stdin:
    dtype, folder = line.rstrip().split(" ", 1)
    try:
        check(folder, getattr(torch, dtype))
        print("loaded", flush=True)
    except Exception:
        print(repr(traceback.format_exc()), flush=True)
"""


SOURCE = (Path(__file__).parent / "stock_style.py").read_text()


def _ported(library: str) -> Any:
    """The module in stock's style, for one library: nothing but its import lines changes."""
    module = types.ModuleType(f"ported_to_{library}")
    sys.modules[module.__name__] = module
    exec(compile(SOURCE.replace(STOCK, library), "stock_style.py", "exec"), vars(module))
    return module


def _sharded(full: torch.Tensor) -> torch.Tensor:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return full.clone()
    return distribute_tensor(full, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def _state(value: float = 1.0) -> dict[str, Any]:
    filled = {"step": 7, "names": ["a", "b"]} if value else {"step": 0, "names": ["old"]}
    return {"model": {"w": _sharded(FULL * value), "b": torch.full((3,), value)}, **filled}


def _same(loaded: dict[str, Any], dtype: torch.dtype = torch.float32) -> bool:
    wanted = _state()
    weights = loaded["model"]["w"], wanted["model"]["w"]
    local, right = (value.to_local() if isinstance(value, DTensor) else value for value in weights)
    return bool(
        torch.equal(local, right.to(dtype))
        and torch.equal(loaded["model"]["b"], wanted["model"]["b"].to(dtype))
        and (loaded["step"], loaded["names"]) == (7, ["a", "b"])
    )


def _save(library: str, folder: str, planner: str | None) -> str:
    module = importlib.import_module(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metadata = module.save(
            _state(),
            storage_writer=_ported(library).Writer(folder),
            planner=getattr(_ported(library), planner)() if planner else None,
        )
    return type(metadata).__module__


def _load(library: str, folder: str, how: str) -> bool:
    module = importlib.import_module(library)
    state = _state(0.0)
    ported = how == "ported"
    storage = _ported(library).Reader(folder) if ported else module.FileSystemReader(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.load(state, storage_reader=storage)
    return _same(state)


@pytest.fixture(scope="module")
def stranger() -> Iterator[Callable[[Path, str], str]]:
    """Loads a folder of a dtype by stock, where nothing of ours is imported; `loaded`, or what went wrong."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", STRANGER], **pipes) as process:

        def loads(folder: Path, dtype: str) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{dtype} {folder}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield loads


@pytest.mark.interop
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("planner", [None, "FP16Planner"])
def test_ported_writer_writes_what_stock_and_we_load(
    ranks: Any, stranger: Callable[[Path, str], str], tmp_path: Path, world: int, planner: str | None
) -> None:
    folder = tmp_path / "ported"
    assert ranks.run(world, _save, OURS, str(folder), planner) == ["dcp_core.records.metadata"] * world
    assert stranger(folder, "float16" if planner else "float32") == "loaded"
    for ranks_that_load in {world, 1}:
        for how in ("own", "ported"):
            for library in (OURS, STOCK):
                found = ranks.run(ranks_that_load, _load, library, str(folder), how)
                assert found == [True] * ranks_that_load, (library, how, ranks_that_load)


@pytest.mark.interop
def test_ported_writer_stores_tied_tensors_under_each_name(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    module = importlib.import_module(OURS)
    module.save({"a": weight, "b": weight}, storage_writer=_ported(OURS).Writer(str(tmp_path)), no_dist=True)
    for library in (OURS, STOCK):
        state = {"a": torch.zeros(6), "b": torch.zeros(6)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(library).load(state, checkpoint_id=str(tmp_path), no_dist=True)
        assert torch.equal(state["a"], weight), library
        assert torch.equal(state["b"], weight), library


@pytest.mark.interop
def test_ported_reader_reads_what_stock_and_our_writer_wrote(ranks: Any, tmp_path: Path) -> None:
    for library in (STOCK, OURS):
        ranks.run(2, _save_by_own_writer, library, str(tmp_path / library))
        assert ranks.run(2, _load, OURS, str(tmp_path / library), "ported") == [True, True], library


def _save_by_own_writer(library: str, folder: str) -> None:
    module = importlib.import_module(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.save(_state(), storage_writer=module.FileSystemWriter(folder))


def _save_halved(library: str, folder: str) -> None:
    module = importlib.import_module(library)
    module.save(_state(), storage_writer=module.FileSystemWriter(folder), planner=_ported(library).FP16Planner())


@pytest.mark.interop
@pytest.mark.parametrize("world", [1, 2])
def test_planner_that_edits_the_plan_and_converts_the_data(
    ranks: Any, stranger: Callable[[Path, str], str], tmp_path: Path, world: int
) -> None:
    ranks.run(world, _save_halved, OURS, str(tmp_path / "halved"))
    metadata = importlib.import_module(OURS).FileSystemReader(tmp_path / "halved").read_metadata()
    assert metadata.state_dict_metadata["model.w"].properties.dtype is torch.float16
    assert stranger(tmp_path / "halved", "float16") == "loaded"
    assert ranks.run(world, _load, OURS, str(tmp_path / "halved"), "own") == [True] * world


def _save_renamed(library: str, folder: str) -> None:
    module = importlib.import_module(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.save({"foo_w": _sharded(FULL), "foo_step": 7, "other": torch.ones(2)}, checkpoint_id=folder)


def _load_renamed(library: str, folder: str) -> bool:
    module = importlib.import_module(library)
    state = {"w": torch.zeros(6, 5), "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.load(state, checkpoint_id=folder, planner=_ported(library).RenamingPlanner())
    return torch.equal(state["w"], FULL) and state["step"] == 7


@pytest.mark.interop
@pytest.mark.parametrize("saved_by", [STOCK, OURS])
def test_planner_that_renames_what_it_loads(ranks: Any, tmp_path: Path, saved_by: str) -> None:
    ranks.run(2, _save_renamed, saved_by, str(tmp_path))
    for library in (STOCK, OURS):
        assert ranks.run(2, _load_renamed, library, str(tmp_path)) == [True, True], library


def _load_through_buffers(library: str, folder: str) -> tuple[bool, int]:
    module = importlib.import_module(library)
    planner = _ported(library).WatchingPlanner()
    state = _state(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.load(state, checkpoint_id=folder, planner=planner)
    return _same(state), len(planner.committed)


@pytest.mark.interop
@pytest.mark.parametrize("saved_by", [STOCK, OURS])
def test_planner_that_reads_through_its_own_buffers(ranks: Any, tmp_path: Path, saved_by: str) -> None:
    ranks.run(2, _save_by_own_writer, saved_by, str(tmp_path))
    for library in (STOCK, OURS):
        assert ranks.run(2, _load_through_buffers, library, str(tmp_path)) == [(True, 2)] * 2, library
