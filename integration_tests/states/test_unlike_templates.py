"""Templates of several ranks that hold less than the checkpoint: what is filled, and what is warned of."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_all as dcp


def loaded(folder: str, template: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dcp.load(template, checkpoint_id=folder)
    return [str(each.message) for each in told]


def unused_keys(folder: str) -> list[list[str]]:
    rank = dist.get_rank()
    state = {"model": dict.fromkeys(("s0.a", "s1.a", "head", "tail"), 1), "random": dcp.PerRank(rank), "other": 1}
    dcp.save(state, checkpoint_id=folder)
    stages = {"model": {f"s{rank}.a": 0, ("head", "tail")[rank]: 0}}
    partial = {"model": {f"s{rank}.a": 0, "head": 0}}
    alone = {"model": {"s0.a": 0, "s1.a": 0, "head": 0, **({"tail": 0} if rank else {})}}
    return [loaded(folder, template) for template in (stages, partial, alone, {"random": dcp.PerRank(0)}, {})]


def test_only_keys_that_no_rank_loads_are_warned_of_and_once(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks.run(2, unused_keys, str(tmp_path / "c"))
    assert [len(told) for told in first] == [0, 1, 0, 0, 0]
    assert first[1][0].startswith("1 key(s) of the checkpoint were not loaded")
    assert "'model.tail'" in first[1][0]
    assert [len(told) for told in second] == [0, 0, 0, 0, 0]


def filled(folder: str) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.arange(10.0).view(5, 2)
    dcp.save({"a": {"w": distribute_tensor(weight, mesh, [Shard(0)])}, "b": [{"x": 1}]}, checkpoint_id=folder)
    template: dict[str, Any] = {"a": {}, "b": []}
    messages = loaded(folder, template)
    whole = template["a"]["w"]
    return not messages and type(whole) is torch.Tensor and torch.equal(whole, weight) and template["b"] == [{"x": 1}]


def test_every_rank_gets_whole_tensors_in_empty_dicts(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, filled, str(tmp_path / "c")) == [True, True]


def tied(folder: str) -> list[list[str]]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for rows in (5, 1):  # of one row, the second rank holds nothing
        dcp.save({"a": distribute_tensor(torch.ones(rows, 2), mesh, [Shard(0)])}, checkpoint_id=f"{folder}-{rows}")
        weight = distribute_tensor(torch.zeros(rows, 2), mesh, [Shard(0)])
        report = dcp.load({"a": weight, "b": weight.detach()}, checkpoint_id=f"{folder}-{rows}")
        found.append([*report.loaded, str(float(weight.to_local().sum()))])
    return found


def test_shards_that_share_memory_are_filled_by_either_name(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks.run(2, tied, str(tmp_path / "c"))
    assert [each[:2] for each in (*first, *second)] == [["a", "b"]] * 4
    assert [first[0][2], second[0][2], first[1][2]] == ["6.0", "4.0", "2.0"]
