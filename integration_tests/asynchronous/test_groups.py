"""Who saves together, and what takes turns: groups without a TCP store, ranks that plan alone, model parts, ids."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_async import AsyncSaver, WorkerError
from dcp_async.saver import shared_saver
from dcp_core import load
from dcp_ranks.testing.ranks import RankPool

KINDS = ["thread", "process"]


def _state(value: float) -> dict[str, Any]:
    return {f"own.{dist.get_rank()}": torch.full((50,), value), "both": torch.full((5,), value), "n": int(value)}


def _values(folder: str) -> set[float]:
    """What a rank finds in a checkpoint."""
    found = _state(-1)
    load(found, checkpoint_id=folder)
    return {float(value) for each in found.values() for value in torch.as_tensor(each).reshape(-1)}


def _alone_in_planning(folder: str, kind: str) -> list[set[float]]:
    """Every rank plans for itself and publishes an index of its own, twice into one folder."""
    found = []
    for number in (1, 2):
        shared_saver(kind).save(_state(number), checkpoint_id=folder, use_collectives=False).result()  # type: ignore[union-attr]
        dist.barrier()
        found.append(_values(folder))
        dist.barrier()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_plan_alone(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert ranks.run(2, _alone_in_planning, str(tmp_path / "a"), kind, timeout_seconds=280) == [[{1.0}, {2.0}]] * 2
    assert {path.name for path in (tmp_path / "a").glob("__?.metadata")} == {"__0.metadata", "__1.metadata"}
    assert not (tmp_path / "a" / ".metadata").exists()


def _over_a_file(folder: str, rank_file: str) -> tuple[set[float], str]:
    """A group that meets in a file: the thread saver saves, the process saver says why it cannot."""
    dist.init_process_group("gloo", init_method=f"file://{rank_file}.store", rank=_draw(rank_file), world_size=2)
    try:
        with AsyncSaver("thread") as saver:
            saver.save(_state(3), checkpoint_id=folder).result()  # type: ignore[union-attr]
        dist.barrier()
        values = _values(folder)
        with AsyncSaver("process") as saver:
            error = saver.save(_state(4), checkpoint_id=folder).exception(timeout=250)  # type: ignore[union-attr]
        assert isinstance(error, WorkerError), error
        dist.barrier()
        assert _values(folder) == values
        return values, str(error)
    finally:
        dist.destroy_process_group()


def _draw(path: str) -> int:
    """A number of one's own, by who makes which file first."""
    for number in range(2):
        try:
            Path(f"{path}.{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number
    raise RuntimeError("more than two ranks")


def test_a_group_that_meets_in_a_file(ranks: RankPool, tmp_path: Path) -> None:
    arguments = str(tmp_path / "checkpoint"), str(tmp_path / "rank")
    for values, told in ranks.run(2, _over_a_file, *arguments, timeout_seconds=280, backend=None):
        assert values == {3.0}
        assert "use the thread saver" in told
        assert "env://" in told


PARTS = {"embedding": 3, "blocks": 40, "head": 1}


def _in_turn(folder: str, kind: str) -> tuple[list[int], int]:
    """Parts of a model in checkpoints of their own, one after the other through one saver; bytes of messages."""
    rank, sent = dist.get_rank(), []
    parts = {
        name: {f"{name}.{rank}.{number}": torch.zeros(20 + number) for number in range(count)}
        for name, count in PARTS.items()
    }
    wrong = 0
    saver = shared_saver(kind)
    for step in range(1, 4):
        for name, part in parts.items():
            for tensor in part.values():
                tensor.fill_(step)
            saver.save({**part, "step": step}, checkpoint_id=f"{folder}/{name}-{step % 2}")
        saver.wait()
        worker = getattr(saver.backend, "worker", None)
        sent.append(0 if worker is None else worker.bytes_sent)
    dist.barrier()
    for name, part in parts.items():
        for step in (2, 3):
            found: dict[str, Any] = {**{key: torch.zeros_like(value) for key, value in part.items()}, "step": 0}
            load(found, checkpoint_id=f"{folder}/{name}-{step % 2}", no_dist=True)
            wrong += found.pop("step") != step
            wrong += sum(not bool((value == step).all()) for value in found.values())
    return [later - before for before, later in itertools.pairwise(sent)], wrong


@pytest.mark.parametrize("kind", KINDS)
def test_model_parts_and_ids_take_turns(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    for sent, wrong in ranks.run(2, _in_turn, str(tmp_path), kind, timeout_seconds=280):
        assert wrong == 0
        assert max(sent) < (350 + len(str(tmp_path))) * len(PARTS)  # each is known after its first save


def _on_devices(name: str, folder: str, kind: str) -> set[float]:
    """A group that can do no collectives in host memory."""
    state = {key: value.to(name) if isinstance(value, torch.Tensor) else value for key, value in _state(5).items()}
    future = shared_saver(kind).save(state, checkpoint_id=folder)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    future.result()  # type: ignore[union-attr]
    dist.barrier(device_ids=[torch.get_device_module(name).current_device()])
    return _values(folder)


@pytest.mark.device
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_of_devices_alone(
    ranks: RankPool, tmp_path: Path, device: str, device_backend: str, kind: str, world_size: int
) -> None:
    if torch.get_device_module(device).device_count() < world_size:
        pytest.skip(f"needs {world_size} devices")
    found = ranks.run(world_size, _on_devices, device, str(tmp_path), kind, timeout_seconds=280, backend=device_backend)
    assert found == [{5.0}] * world_size
