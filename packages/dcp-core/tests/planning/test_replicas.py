"""Comparison of replicas: of every size, with the keys and ranks of those that differ."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_core.errors import PlanError
from dcp_core.planning import save_planner
from dcp_core.planning.replicas import DivergentReplicaWarning, replica_digest
from dcp_core.planning.save_planner import DefaultSavePlanner
from dcp_core.records.protocols import SavePlan

KIB = 1024


@pytest.mark.parametrize("nbytes", [1, 64 * KIB, 64 * KIB + 1, 65 * KIB, 1 << 20, (64 << 20) + 3])
def test_both_ends_of_a_replica_are_compared(nbytes: int) -> None:
    one = torch.zeros(nbytes, dtype=torch.uint8)
    same = replica_digest(one.clone(), everything=False)
    assert same is not None
    assert replica_digest(one, everything=False) == same
    for place in {0, nbytes - 1}:
        other = one.clone()
        other[place] = 1
        assert replica_digest(other, everything=False) != same
    inner = torch.arange(nbytes, dtype=torch.float64).to(torch.uint8) + 1
    assert replica_digest(inner, everything=False) != same


def test_samples_are_few_bytes_of_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    crc32 = save_planner.zlib.crc32
    monkeypatch.setattr("dcp_core.planning.replicas.zlib.crc32", lambda data: seen.append(len(data)) or crc32(data))
    for nbytes in (100 * KIB, 16 << 20, 256 << 20):
        replica_digest(torch.empty(nbytes, dtype=torch.uint8), everything=False)
    assert seen == [16 * 64, 16 * KIB, 64 * KIB]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(300, 300).t(), torch.zeros(30_000, dtype=torch.complex64).conj(), torch.zeros(3, device="meta")],
)
def test_what_is_not_cheap_is_not_compared(tensor: torch.Tensor) -> None:
    assert replica_digest(tensor, everything=False) is None


def plans(
    monkeypatch: pytest.MonkeyPatch, values: list[Any], **options: Any
) -> tuple[DefaultSavePlanner, list[SavePlan]]:
    monkeypatch.setattr(save_planner, "job_size", lambda: len(values))
    made = []
    for value in values:
        planner = DefaultSavePlanner(**options)
        planner.set_up_planner({"layer": {"value": value}})
        made.append(planner.create_local_plan())
    return planner, made


BIG = 1 << 20
KINDS: dict[str, Any] = {
    "small": lambda rank: torch.full((3,), float(rank)),
    "large": lambda rank: torch.full((BIG,), float(rank)),
    "parameter": lambda rank: torch.nn.Parameter(torch.full((BIG,), float(rank))),
    "bfloat16": lambda rank: torch.full((BIG,), rank, dtype=torch.bfloat16),
    "object": lambda rank: f"rank {rank}",
    "large object": lambda rank: f"{rank}" * BIG,
    "tensors in an object": lambda rank: (torch.full((BIG,), rank), 1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replicas", ["check", "raise", "ignore"])
def test_replicas_that_differ(monkeypatch: pytest.MonkeyPatch, kind: str, replicas: str) -> None:
    planner, made = plans(monkeypatch, [KINDS[kind](rank) for rank in (0, 1, 0)], replicas=replicas)
    words = r"'layer\.value' on ranks \[1\]"
    if replicas == "raise":
        with pytest.raises(PlanError, match=words):
            planner.create_global_plan(made)
    elif replicas == "check":
        with pytest.warns(DivergentReplicaWarning, match=words):
            planner.create_global_plan(made)
    else:
        planner.create_global_plan(made)


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_that_are_equal(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    planner, made = plans(monkeypatch, [KINDS[kind](1) for _ in range(3)], replicas="raise")
    planner.create_global_plan(made)
    assert all(list(plan.digests or ()) == ["layer.value"] for plan in made)


@pytest.mark.parametrize(("placement", "compared"), [(Replicate(), True), (Shard(0), False)])
def test_replicated_dtensors_are_compared_and_shards_are_not(
    monkeypatch: pytest.MonkeyPatch, placement: Any, compared: bool
) -> None:
    made = []
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            mesh = DeviceMesh("cpu", torch.arange(2))
            value = DTensor.from_local(torch.full((BIG,), float(rank)), mesh, [placement], run_check=False)
            made.append(_plan(monkeypatch, value))
        finally:
            dist.destroy_process_group()
    planner = DefaultSavePlanner(replicas="raise")
    planner.set_up_planner({})
    if compared:
        with pytest.raises(PlanError, match="'w' on ranks"):
            planner.create_global_plan(made)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            planner.create_global_plan(made)


def _plan(monkeypatch: pytest.MonkeyPatch, value: Any) -> SavePlan:
    monkeypatch.setattr(save_planner, "job_size", lambda: 2)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": value})
    return planner.create_local_plan()
