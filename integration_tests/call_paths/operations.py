"""The operations that are counted, on rank 0 of two: of one sharded and one replicated tensor, and an int."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_all
from integration_tests.call_paths.counting import CallPath, counted

__all__ = ["operations"]


def operations(folder: Path) -> dict[str, CallPath]:
    """Carry the operations out, on all ranks, and count each.

    Args:
        folder: An empty one, the same for all ranks.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return dict(_operations(folder, mesh))


def _operations(folder: Path, mesh: DeviceMesh) -> Iterator[tuple[str, CallPath]]:
    place, saver = str(folder / "ours"), dcp_all.AsyncSaver("process")
    yield "first save", _count(lambda: dcp_all.save(_state(mesh), checkpoint_id=place + "1"))
    yield "second save", _count(lambda: dcp_all.save(_state(mesh), checkpoint_id=place + "2"))
    yield "load, resharded", _count(lambda: dcp_all.load(_state(mesh, Replicate()), checkpoint_id=place + "1"))
    saver.save(_state(mesh), checkpoint_id=place + "3").result()  # starts the worker
    futures: list[Any] = []
    yield "async save, call", _count(lambda: futures.append(saver.save(_state(mesh), checkpoint_id=place + "4")))
    futures[0].result()
    saver.close()
    yield "dcp verify", _count(lambda: _verify(place + "1"))
    theirs = str(folder / "stock")
    yield "first save, stock", _count(lambda: stock.save(_state(mesh), checkpoint_id=theirs + "1"), _is_stocks)
    yield "second save, stock", _count(lambda: stock.save(_state(mesh), checkpoint_id=theirs + "2"), _is_stocks)
    template = _state(mesh, Replicate())
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
