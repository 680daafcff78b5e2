"""Megatron-Core's own `dist_checkpointing` (`torch_dist`), with stock and with ours in its place, on one and two ranks.

Megatron-Core asks CUDA for a device and waits for it; it gets the CPU here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import dcp_all as dcp
from dcp_bridge import replace_stock

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="needs megatron-core: `nox -s frameworks` installs it"
    ),
    pytest.mark.filterwarnings("ignore"),
]


def _state(*, filled: bool) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    rank, count = dist.get_rank(), dist.get_world_size()
    rows = torch.full((4, 3), float(rank + 1)) if filled else torch.zeros(4, 3)
    whole = torch.arange(5.0, dtype=torch.bfloat16)
    return {
        "weight": ShardedTensor.from_rank_offsets("decoder.weight", rows, (0, rank, count)),
        "norm": ShardedTensor.from_rank_offsets("norm", whole if filled else whole * 0, replica_id=rank),
        "rng": ShardedObject("rng", {"seed": rank} if filled else None, (count,), (rank,)),
        "iteration": 100,
    }


def _run(side: str, step: str, folder: str) -> Any:
    """One step of a training with Megatron-Core; the processes of a side are its own, and stay as it leaves them."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    if side == "ours":
        replace_stock()
    from megatron.core import dist_checkpointing

    if side == "ours, late":
        replace_stock()
    if step == "save":
        if dist.get_rank() == 0:
            Path(folder).mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(_state(filled=True), folder)
        _end_server()
        return None
    state = dist_checkpointing.load(_state(filled=False), folder)
    named = sorted(dist_checkpointing.load_tensors_metadata(folder))
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in state.items()}, named


def _end_server() -> None:
    """End the server of Megatron-Core's queue of results: it would survive the rank's process, which is killed."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is not None:
        filesystem_async._results_queue._manager.shutdown()
        filesystem_async._results_queue = None


# "late": stock is replaced after Megatron-Core was imported, so its classes stay derived from stock's.
SIDES = ("stock", "ours", "ours, late")


@pytest.fixture(scope="module")
def sides() -> Iterator[dict[str, Any]]:
    pool = pytest.importorskip("dcp_ranks.testing.ranks").RankPool
    with contextlib.ExitStack() as stack:
        yield {side: stack.enter_context(pool(timeout_seconds=600)) for side in SIDES}


@pytest.fixture(params=[1, 2])
def count(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("loader", SIDES)
@pytest.mark.parametrize("saver", SIDES)
def test_it_saves_and_loads(sides: dict[str, Any], count: int, saver: str, loader: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "iter_0000100")
    sides[saver].run(count, _run, saver, "save", folder)
    for rank, (state, named) in enumerate(sides[loader].run(count, _run, loader, "load", folder)):
        assert state["weight"] == [[rank + 1.0] * 3] * 4
        assert state["norm"] == [0, 1, 2, 3, 4]
        assert state["rng"] == {"seed": rank}
        assert state["iteration"] == 100
        assert named == ["decoder.weight", "norm"]


@pytest.mark.parametrize("saver", SIDES)
def test_calls_and_commands_of_ours_take_its_folder(
    sides: dict[str, Any], count: int, saver: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / "iter_0000100"
    sides[saver].run(count, _run, saver, "save", str(folder))
    wanted = torch.arange(1.0, count + 1).repeat_interleave(4).unsqueeze(1).expand(-1, 3)
    for module in (dcp, stock):
        template = {"decoder.weight": torch.zeros(4 * count, 3)}
        module.load(template, checkpoint_id=folder)
        assert torch.equal(template["decoder.weight"], wanted)
    found = dcp.load_keys("decoder.weight", checkpoint_id=folder)
    assert torch.equal(found["decoder.weight"], wanted)
    other = tmp_path / "model.safetensors"
    for command in (
        ["ls", folder.parent],
        ["show", folder],
        ["verify", folder],
        ["convert", folder, other, "--include", "decoder.*"],
        ["convert", folder, tmp_path / "copy"],
        ["verify", tmp_path / "copy"],
        ["rm", "--yes", folder],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "dcp_inspect", *map(str, command)],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    assert other.exists()
    assert {path.name for path in folder.iterdir()} == {"common.pt", "metadata.json"}  # `rm` leaves files of others
