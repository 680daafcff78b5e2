"""Comparison of replicas: of every size, with the keys and ranks of those that differ."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_core.errors import PlanError
from dcp_core.planning import save_planner
from dcp_core.planning.replicas import DivergentReplicaWarning, replica_digests
from dcp_core.planning.save_planner import DefaultSavePlanner
from dcp_core.records.protocols import SavePlan
from integration_tests.kits.wrapper_tensors import WRAPPER_GLOBALS, BlockTensor

KIB = 1024


def digest(tensor: torch.Tensor) -> int | None:
    return replica_digests([tensor], everything=False)[0]


@pytest.mark.parametrize("nbytes", [1, 64 * KIB, 64 * KIB + 1, 65 * KIB, 1 << 20, (64 << 20) + 3])
def test_both_ends_of_a_replica_are_compared(nbytes: int) -> None:
    one = torch.zeros(nbytes, dtype=torch.uint8)
    same = digest(one.clone())
    assert same is not None
    assert digest(one) == same
    for place in {0, nbytes - 1}:
        other = one.clone()
        other[place] = 1
        assert digest(other) != same
    inner = torch.arange(nbytes, dtype=torch.float64).to(torch.uint8) + 1
    assert digest(inner) != same


def test_samples_are_few_bytes_of_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    crc32 = save_planner.zlib.crc32
    monkeypatch.setattr("dcp_core.planning.replicas.zlib.crc32", lambda data: seen.append(len(data)) or crc32(data))
    for nbytes in (100 * KIB, 16 << 20, 256 << 20):
        digest(torch.empty(nbytes, dtype=torch.uint8))
    assert seen == [16 * 64, 16 * KIB, 64 * KIB]


def _strided(values: torch.Tensor) -> list[torch.Tensor]:
    """Return equal tensors with other strides."""
    wider = values.new_zeros(values.shape[0], values.shape[1] * 2)
    wider[:, ::2] = values
    return [values.t().contiguous().t(), wider[:, ::2]]


@pytest.mark.parametrize("rows", [3, 700])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.float64, torch.complex128]
)
def test_strides_do_not_change_what_is_compared(rows: int, dtype: torch.dtype) -> None:
    values = torch.arange(rows * 701).reshape(rows, 701).to(dtype)
    other = values.clone()
    other[-1, -1] = 0 if dtype is torch.bool else 1
    same, different = (digest(each) for each in (values, other))
    assert same is not None
    assert different != same
    assert [digest(each) for each in _strided(values)] == [same] * 2
    assert [digest(each) for each in _strided(other)] == [different] * 2


@pytest.mark.parametrize("size", [3, 30_000])
def test_conjugated_and_negative_views_are_compared_by_value(size: int) -> None:
    conjugated = torch.full((size,), 1 + 2j).conj()
    for view in (conjugated, conjugated.imag):
        copied = view.resolve_conj().resolve_neg().clone()
        assert view.is_conj() or view.is_neg()
        assert digest(view) == digest(copied) is not None
        assert digest(view) != digest(copied + 1)


def test_a_tensor_without_data_is_not_compared() -> None:
    assert digest(torch.zeros(3, device="meta")) is None


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
    "channels last": lambda rank: torch.full((64, 64, 8, 8), rank).to(memory_format=torch.channels_last),
    "transposed on one rank": lambda rank: torch.full((300, 300), float(rank)).t() if rank else torch.zeros(300, 300),
    "wrapper": lambda rank: BlockTensor.of(torch.full((BIG,), float(rank))),
    "quantized": lambda rank: torch.quantize_per_tensor(torch.full((3,), float(rank)), 0.1, 0, torch.qint8),
    "object": lambda rank: f"rank {rank}",
    "large object": lambda rank: f"{rank}" * BIG,
    "tensors in an object": lambda rank: (torch.full((BIG,), rank), 1),
    "array of 20 MiB": lambda rank: np.full(20 * BIG // 4, rank, np.float32),
    "array of 20 MiB, by columns": lambda rank: (np.full((5 * BIG, 2), rank, np.int16, "F"), {1}),
    "array of 20 MiB of text": lambda rank: np.full(5 * BIG, f"{rank}"),
    "tensor of 20 MiB in an object": lambda rank: (torch.full((5 * BIG,), float(rank)).view(BIG, 5).t(), 1),
    "string of 20 MiB": lambda rank: [f"{rank}" * 20 * BIG],
    "bytes of 20 MiB": lambda rank: bytes([rank]) * 20 * BIG,
}


pytestmark = [
    pytest.mark.usefixtures("wrapper_globals"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


@pytest.fixture
def wrapper_globals() -> Iterator[None]:
    with torch.serialization.safe_globals(WRAPPER_GLOBALS):
        yield


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


def test_large_objects_of_many_parts_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal values may have archives of other sizes: one string or many."""
    word = "x" * 1000
    same, other = [word] * 20_000, ["".join(["x"] * 1000) for _ in range(20_000)]
    planner, made = plans(monkeypatch, [same, other, ["y" * 1000] * 20_000], replicas="raise")
    planner.create_global_plan(made)
    planner, made = plans(monkeypatch, [same, same[:3]], replicas="raise")
    with pytest.raises(PlanError, match=r"'layer\.value' on ranks \[1\]"):
        planner.create_global_plan(made)


@pytest.mark.parametrize("mib", [1, 20])
def test_any_two_sizes_of_an_object_differ(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    for make in (bytes, lambda size: "a" * size, lambda size: np.zeros(size, np.int8), lambda size: {"a" * size}):
        planner, made = plans(monkeypatch, [(make(mib << 20),), (make((mib << 20) - 1),)], replicas="raise")
        with pytest.raises(PlanError, match=r"'layer\.value' on ranks \[1\]"):
            planner.create_global_plan(made)


LAYOUTS: dict[str, tuple[list[Any], bool]] = {
    "replicated": ([Replicate(), Replicate()], True),
    "sharded over all ranks": ([Shard(0), Shard(0)], False),
    "sharded, and the shards replicated": ([Replicate(), Shard(0)], True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_boxes_that_several_ranks_hold_are_compared(layout: str) -> None:
    placements, compared = LAYOUTS[layout]
    made = [_plan_of_rank(rank, torch.arange(4).reshape(2, 2), placements) for rank in range(4)]
    assert [bool(plan.digests) for plan in made] == [compared] * 4
    _check_globally(made, differs=compared)


def test_equally_named_shards_of_several_meshes_are_compared() -> None:
    """Such as those of pipeline stages that count their layers from 0, and of groups of experts."""
    stages = torch.tensor([[0, 1], [2, 3]])
    made = [_plan_of_rank(rank, stages[rank // 2], [Shard(0)]) for rank in range(4)]
    assert [list(plan.digests or ()) for plan in made] == [[("w", (0,))], [("w", (BIG,))]] * 2
    _check_globally(made, differs=True)


def _plan_of_rank(rank: int, ranks: torch.Tensor, placements: list[Any]) -> SavePlan:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        local = torch.full((BIG,), float(rank))
        value = DTensor.from_local(local, DeviceMesh("cpu", ranks), placements, run_check=False)
        planner = DefaultSavePlanner()
        planner.set_up_planner({"w": value})
        return planner.create_local_plan()
    finally:
        dist.destroy_process_group()


def _check_globally(made: list[SavePlan], *, differs: bool) -> None:
    planner = DefaultSavePlanner(replicas="raise")
    planner.set_up_planner({})
    if differs:
        with pytest.raises(PlanError, match="'w' on ranks"):
            planner.create_global_plan(made)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            planner.create_global_plan(made)
