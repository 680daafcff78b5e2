"""Values that differ between ranks: declared, and found where they were not."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.tensor import DTensor, Replicate

import dcp_all as dcp
from dcp_async import AsyncSaver
from dcp_async.saver import shared_saver
from dcp_core.planning.replicas import DivergentReplicaWarning
from integration_tests.kits.wrapper_tensors import WRAPPER_GLOBALS, BlockTensor


class Loader:
    """A stateful part with a state of its own on each rank."""

    def __init__(self, position: int, otherwise: str) -> None:
        self.position = position
        self.otherwise = otherwise

    def state_dict(self) -> dict[str, Any]:
        value = {"position": self.position, "shuffle": torch.full((3,), self.position)}
        return {"epoch": 4, "state": dcp.PerRank(value, otherwise=self.otherwise)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["epoch"] == 4
        held = state_dict["state"].value
        assert held["shuffle"].tolist() == [held["position"]] * 3
        self.position = held["position"]


def save(folder: str, collectives: bool) -> None:
    rank = dist.get_rank()
    state = {"loader": Loader(100 + rank, "keep"), "rng": dcp.PerRank(torch.tensor([rank])), "w": torch.arange(4.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcp.save(state, checkpoint_id=folder, use_collectives=collectives)


def load(folder: str, otherwise: str) -> tuple[int, int, dict[str, int | None]]:
    loader = Loader(7, otherwise)
    template = {"loader": loader, "rng": dcp.PerRank(torch.tensor([-1]), otherwise=otherwise), "w": torch.zeros(4)}
    report = dcp.load(template, checkpoint_id=folder)
    assert template["w"].tolist() == [0, 1, 2, 3]
    return loader.position, int(template["rng"].value), report.per_rank


@pytest.mark.parametrize("collectives", [True, False])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 2), (4, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize("otherwise", ["keep", "modulo"])
def test_every_rank_gets_its_own(
    ranks: Any, tmp_path: Path, saved_on: int, loaded_on: int, otherwise: str, collectives: bool
) -> None:
    ranks.run(saved_on, save, str(tmp_path), collectives)
    for rank, (position, state, taken) in enumerate(ranks.run(loaded_on, load, str(tmp_path), otherwise)):
        source = rank if rank < saved_on else rank % saved_on if otherwise == "modulo" else None
        assert position == (7 if source is None else 100 + source)
        assert state == (-1 if source is None else source)
        assert taken == {"loader.state": source, "rng": source}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_and_tools_see_the_values_of_all_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, save, str(tmp_path), True)
    template = {"rng": {"rank_0": torch.tensor([9]), "rank_1": torch.tensor([9])}}
    stock.load(template, storage_reader=stock.FileSystemReader(tmp_path), no_dist=True)
    assert template == {"rng": {"rank_0": torch.tensor([0]), "rank_1": torch.tensor([1])}}
    found = dcp.load_keys("loader", checkpoint_id=tmp_path)["loader"]["state"]
    assert [found[f"rank_{n}"]["position"] for n in range(2)] == [100, 101]


def different(rank: int) -> dict[str, Any]:
    """Values of the kinds that a saver stages in a way of its own, each of another value on each rank."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    large = torch.full((1 << 19,), float(rank))
    return {
        "large": large,
        "strided": torch.full((600, 500), rank).t(),
        "replicated": DTensor.from_local(large + 1, mesh, [Replicate()], run_check=False),
        "wrapper": BlockTensor.of(large),
        "wrapper.context": BlockTensor.of(torch.arange(float(1 << 16)) * (1 + rank)),
        "quantized": torch.quantize_per_tensor(large + 1, 0.1, 0, torch.qint8),
        "quantizer": torch.quantize_per_tensor(torch.zeros(3), 0.1 + rank, 0, torch.qint8),
        "array": np.full(20 << 18, rank, np.float32),
        "tuple": (torch.full((5 << 20,), float(rank)), "of 20 MiB"),
    }


def save_all_different(folder: str, saver: str) -> list[str]:
    """Return what a rank is told; the state does not fit into the memory for copies of a saver in waves."""
    kind, _, staging = saver.partition(" ")
    options = dcp.SaverOptions(max_staging_bytes=3 << 20, staging="waves" if staging else "refuse")
    torch.serialization.add_safe_globals(WRAPPER_GLOBALS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if kind == "sync":
            dcp.save(different(dist.get_rank()), checkpoint_id=folder)
        else:
            with AsyncSaver(kind, options=options if staging else None) as made:
                made.save(different(dist.get_rank()), checkpoint_id=folder).result(250)  # type: ignore[union-attr]
    return [str(one.message) for one in caught if one.category is DivergentReplicaWarning]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("saver", ["sync", "thread", "thread in waves", "process in waves"])
def test_every_kind_of_replica_is_compared_by_every_saver(ranks: Any, tmp_path: Path, saver: str) -> None:
    (text,), others = ranks.run(2, save_all_different, str(tmp_path), saver)
    assert others == []
    for name in ("large", "strided", "replicated", "wrapper", "wrapper.context", "quantized", "quantizer", "array"):
        assert f"{name!r} on ranks [1]" in text
    assert text.startswith("9 value(s) differ")


def save_by(saver: str, state: dict[str, Any], folder: str, options: dict[str, Any]) -> None:
    """Save with the default planner and these options."""
    planner = dcp.DefaultSavePlanner(**options)
    if saver == "sync":
        dcp.save(state, checkpoint_id=folder, planner=planner)
    else:
        shared_saver(saver).save(state, checkpoint_id=folder, planner=planner).result(timeout=250)  # type: ignore[union-attr]


def save_different(folder: str, options: dict[str, Any], saver: str) -> str:
    """What a rank is told when names mean different things on different ranks."""
    rank = dist.get_rank()
    large = torch.zeros(100_000)
    large[-1] = rank
    word = str(large.shape)
    state = {"small": torch.tensor(rank), "note": f"rank {rank}", "large": large, "same": torch.ones(3)}
    state["alike"] = (word, word if rank else str(large.shape), torch.ones(2))  # a pickle tells these apart
    state |= {f"equal{number}": pair[rank > 0] for number, pair in enumerate(EQUAL_ONLY)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            save_by(saver, state, folder, options)
        except dcp.CheckpointException as error:
            return f"error: {error}"
    return "\n".join(str(one.message) for one in caught if one.category is DivergentReplicaWarning)


EQUAL_ONLY: list[tuple[Any, Any]] = [
    (0.0, -0.0), (1, True), (1, 1.0), (0j, complex(-0.0, 0.0)), ("a", b"a"), (torch.tensor(0.0), torch.tensor(-0.0)),
    (np.int64(1), np.float64(5e-324)), (np.zeros(1), np.zeros(1, np.int64)), (b"1", bytearray(b"1")),
]  # fmt: skip
"""What the first rank has, and what the others have; equal, or of the same bytes."""


@pytest.mark.parametrize(
    ("error", "everything", "saver"),
    [*itertools.product([False, True], [False, True], ["sync"]), (True, True, "thread")],
)
def test_undeclared_differences_are_named(
    ranks: Any, tmp_path: Path, everything: bool, error: bool, saver: str
) -> None:
    """Row 14: warned of by default, with keys and ranks; an error on request."""
    options = {"compare_all": everything, "replicas": "raise" if error else "check"}
    texts = ranks.run(3, save_different, str(tmp_path / "checkpoint"), options, saver)
    for text in texts if error else texts[:1]:
        assert text.startswith("error: ") == error
        assert "'small' on ranks [1, 2]" in text
        assert "'note' on ranks [1, 2]" in text
        assert "'large' on ranks [1, 2]" in text
        assert f"{3 + len(EQUAL_ONLY)} value(s) differ" in text
        assert "'same'" not in text
        assert "'alike'" not in text
        assert "PerRank" in text
    assert (tmp_path / "checkpoint" / ".metadata").exists() != error
