"""The operations that are counted, on rank 0 of two: of one sharded and one replicated tensor, and an int."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_all
from dcp_base import PluginRegistry
from integration_tests.call_paths.counting import CallPath, counted

__all__ = ["one_process", "operations"]

_IMPORTED_BEFORE = ("dcp_fs.storage", "dcp_fs.storage", "dcp_inspect.commands.verify")


def operations(folder: Path, *, briefly: bool = False) -> dict[str, CallPath]:
    """Carry the operations out, on all ranks, and count each.

    Args:
        folder: An empty one, the same for all ranks.
        briefly: Whether to leave out stock's operations, asynchronous saves and second saves.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with _unobserved():
        return dict(_operations(folder, mesh, briefly=briefly))


def one_process(folder: Path) -> dict[str, CallPath]:
    """Count the second save of one tensor and an int in a process without other ranks, ours and stock's."""

    def state() -> dict[str, Any]:
        return {"weight": torch.arange(64.0).reshape(8, 8), "step": 3}

    with _unobserved():
        dcp_all.save(state(), checkpoint_id=folder / "ours1")
        ours = _count(lambda: dcp_all.save(state(), checkpoint_id=folder / "ours2"))
        stock.save(state(), checkpoint_id=folder / "stock1")
        theirs = _count(lambda: stock.save(state(), checkpoint_id=folder / "stock2"), _is_stocks)
    return {"second save, one process": ours, "second save, one process, stock": theirs}


@contextlib.contextmanager
def _unobserved() -> Iterator[None]:
    """Without the observers of example plug-ins that are installed, and of people at a terminal."""
    with (
        mock.patch.object(PluginRegistry, "_subscribe"),
        mock.patch.dict(os.environ, {"DCP_PROGRESS": "0"}),
    ):
        yield


def _operations(folder: Path, mesh: DeviceMesh, *, briefly: bool) -> Iterator[tuple[str, CallPath]]:
    for module in _IMPORTED_BEFORE:  # slow while calls are counted
        importlib.import_module(module)
    place, state, template = str(folder / "ours"), _state(mesh), _state(mesh, Replicate())
    yield "first save", _count(lambda: dcp_all.save(state, checkpoint_id=place + "1"))
    yield "load, resharded", _count(lambda: dcp_all.load(template, checkpoint_id=place + "1"))
    yield "dcp verify", _count(lambda: _verify(place + "1"))
    if briefly:
        return
    yield "second save", _count(lambda: dcp_all.save(state, checkpoint_id=place + "2"))
    with dcp_all.AsyncSaver("process") as saver:
        saver.save(state, checkpoint_id=place + "3").result()  # starts the worker
        futures: list[Any] = []
        yield "async save, call", _count(lambda: futures.append(saver.save(state, checkpoint_id=place + "4")))
        futures[0].result()
    theirs = str(folder / "stock")
    yield "first save, stock", _count(lambda: stock.save(state, checkpoint_id=theirs + "1"), _is_stocks)
    yield "second save, stock", _count(lambda: stock.save(state, checkpoint_id=theirs + "2"), _is_stocks)
    yield "load, resharded, stock", _count(lambda: stock.load(template, checkpoint_id=theirs + "1"), _is_stocks)


def _count(work: Callable[[], object], which: Callable[[str], bool] | None = None) -> CallPath:
    dist.barrier()
    with counted(which or _is_ours) as found:
        work()
    return found


def _state(mesh: DeviceMesh, placement: Any = None) -> dict[str, Any]:
    numbers = torch.arange(64.0).reshape(8, 8)
    sharded = distribute_tensor(numbers, mesh, [placement or Shard(0)])
    return {"sharded": sharded, "replicated": numbers + 1, "step": 3}


def _verify(place: str) -> None:
    from dcp_inspect.cli import run

    with contextlib.redirect_stdout(io.StringIO()):
        code = run(["verify", place])
    if code != 0:
        raise RuntimeError(f"dcp verify ended with {code}")


def _is_ours(file: str) -> bool:
    return "/src/dcp_" in file.replace("\\", "/") and "/testing/" not in file


def _is_stocks(file: str) -> bool:
    return "/torch/distributed/checkpoint/" in file.replace("\\", "/")
