"""Entries A1 to A4 of stock's measured weaknesses: wrong data without any error. Ours refuses, or is right."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import dcp_all as dcp
from integration_tests.weaknesses.both import (
    data_files,
    edit_stock_metadata,
    find_bytes,
    flip,
    our_load,
    our_save,
    quiet,
    stock,
    stock_load,
    stock_save,
)

VALUES = torch.arange(1, 4097, dtype=torch.float32).reshape(64, 64)
PAYLOAD = VALUES.numpy().tobytes()
STEP_7 = b"K\x07."  # the pickle of the number 7, inside the archive of an object


@pytest.mark.parametrize("layout", ["torch", "raw"])
@pytest.mark.parametrize(("key", "wanted", "at", "mask"), [("weight", PAYLOAD, 1003, 0x10), ("step", STEP_7, 1, 0x08)])
def test_a01_flipped_bit_is_refused(tmp_path: Path, layout: str, key: str, wanted: bytes, at: int, mask: int) -> None:
    our_save({"weight": VALUES, "step": 7}, tmp_path, layout=layout)
    path, start = find_bytes(tmp_path, wanted)
    flip(path, start + at, mask)
    with pytest.raises(dcp.CorruptCheckpointError) as caught:
        our_load({"weight": torch.zeros(64, 64), "step": 0}, tmp_path)
    assert (caught.value.file, caught.value.key) == (path.name, key)
    assert caught.value.offset is not None


@pytest.mark.parametrize(("key", "wanted", "at", "mask"), [("weight", PAYLOAD, 1003, 0x10), ("step", STEP_7, 1, 0x08)])
def test_a01_flipped_bit_in_a_checkpoint_of_stock_is_refused(
    tmp_path: Path, key: str, wanted: bytes, at: int, mask: int
) -> None:
    stock_save({"weight": VALUES, "step": 7}, tmp_path)
    path, start = find_bytes(tmp_path, wanted)
    flip(path, start + at, mask)
    template: dict[str, Any] = {"weight": torch.zeros(64, 64), "step": 0}
    stock_load(template, tmp_path)
    wrong = template["step"] == 15 if key == "step" else not torch.equal(template["weight"], VALUES)
    assert wrong, "stock should show the defect"
    with pytest.raises(dcp.CorruptCheckpointError, match=key):
        our_load({"weight": torch.zeros(64, 64), "step": 0}, tmp_path)


@pytest.mark.parametrize(
    ("kept", "hole"), [(slice(0, 0), "0:8, 0:4"), (slice(0, 1), "0:8, 2:4"), (slice(1, 2), "0:8, 0:2")]
)
def test_a02_chunks_that_are_not_there_are_reported(tmp_path: Path, kept: slice, hole: str) -> None:
    stock_save({"weight": _two_shards(torch.arange(1, 33, dtype=torch.float32).reshape(8, 4))}, tmp_path)

    def forget(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["weight"].chunks
        assert len(chunks) == 2
        chunks[:] = chunks[kept]

    edit_stock_metadata(tmp_path, forget)
    silent = stock_load({"weight": torch.zeros(8, 4)}, tmp_path)["weight"]
    assert int((silent == 0).sum()) == 32 - 16 * len([0, 1][kept]), "stock should show the defect"
    template = {"weight": torch.zeros(8, 4)}
    with pytest.raises(dcp.LoadMismatchError, match=hole) as caught:
        our_load(template, tmp_path)
    assert [(problem.key, problem.kind) for problem in caught.value.problems] == [("weight", "hole")]
    assert not template["weight"].any()


def _rank_local_round(module: str, folder: str) -> tuple[int, bool]:
    """Save rows without collectives, load columns: how many elements stayed zero here, and whether all are right."""
    library = importlib.import_module(module)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(1, 65, dtype=torch.float32).reshape(8, 8)
    with quiet():
        library.save({"weight": distribute_tensor(full, mesh, [Shard(0)])}, checkpoint_id=folder, use_collectives=False)
        wanted = distribute_tensor(full, mesh, [Shard(1)])
        template = DTensor.from_local(torch.zeros_like(wanted.to_local()), mesh, [Shard(1)])
        library.load({"weight": template}, checkpoint_id=folder)
    return int((template.to_local() == 0).sum()), torch.equal(template.to_local(), wanted.to_local())


def test_a02_rank_local_checkpoint_loads_with_other_sharding(ranks: Any, tmp_path: Path) -> None:
    silent = ranks.run(2, _rank_local_round, "torch.distributed.checkpoint", str(tmp_path / "stock"))
    assert silent == [(16, False), (16, False)], "stock should show the defect"
    assert ranks.run(2, _rank_local_round, "dcp_all", str(tmp_path / "ours")) == [(0, True), (0, True)]


def _save_and_die_before_publishing(module: str, state: dict[str, Any], folder: str) -> None:
    library = importlib.import_module(module)

    class Killed(library.FileSystemWriter):  # type: ignore[misc, name-defined]
        def finish(self, *_: Any, **__: Any) -> None:
            os._exit(9)

    with quiet():
        library.save(state, storage_writer=Killed(folder), no_dist=True)


OLD = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
NEW = {"b": torch.tensor(20.0), "a": torch.tensor(10.0)}  # in another order


def _blank() -> dict[Any, Any]:
    return {"a": torch.tensor(0.0), "b": torch.tensor(0.0)}


def test_a03_killed_overwrite_leaves_the_old_checkpoint(ranks: Any, tmp_path: Path) -> None:
    for name, save in (("torch.distributed.checkpoint", stock_save), ("dcp_all", our_save)):
        save(OLD, tmp_path / name)
        ranks.run(1, _save_and_die_before_publishing, name, NEW, str(tmp_path / name), expect_death=[0])
    mixed = stock_load(_blank(), tmp_path / "torch.distributed.checkpoint")
    assert (mixed["a"], mixed["b"]) == (20, 10), "stock should show the defect"
    assert our_load(_blank(), tmp_path / "dcp_all") == OLD
    our_save(NEW, tmp_path / "dcp_all")  # and the dead save stands in nobody's way
    assert our_load(_blank(), tmp_path / "dcp_all") == {"a": 10, "b": 20}
    assert len(data_files(tmp_path / "dcp_all")) == 1


@pytest.mark.parametrize("library", ["stock", "ours"])
def test_a03_newest_save_wins_with_and_without_collectives(tmp_path: Path, library: str) -> None:
    module: Any = stock() if library == "stock" else dcp
    for state, collectives in ((OLD, True), (NEW, False)):
        with quiet():
            module.save(dict(state), checkpoint_id=tmp_path, no_dist=True, use_collectives=collectives)
    template = _blank()
    with quiet():
        module.load(template, checkpoint_id=tmp_path, no_dist=True)
    if library == "stock":
        assert template != {"a": 10, "b": 20}, "stock should show the defect"
    else:
        assert template == {"a": 10, "b": 20}


def _two_shards(full: torch.Tensor) -> LocalShardsWrapper:
    """Two parts that one rank holds of one tensor: column-wise, as embedding tables are split."""
    return LocalShardsWrapper([full[:, :2].clone(), full[:, 2:].clone()], [(0, 0), (0, 2)])


@pytest.mark.parametrize("layout", ["torch", "raw"])
@pytest.mark.parametrize("single_file", [True, False])
def test_a04_every_local_shard_of_a_name_is_kept(tmp_path: Path, layout: str, single_file: bool) -> None:
    full = torch.arange(1, 21, dtype=torch.float32).reshape(4, 5)
    our_save({"table": _two_shards(full)}, tmp_path, layout=layout, single_file_per_rank=single_file)
    shards = _two_shards(torch.zeros(4, 5))
    our_load({"table": shards}, tmp_path)
    assert torch.equal(torch.cat(shards.local_shards(), 1), full)
    assert torch.equal(our_load({"table": torch.zeros(4, 5)}, tmp_path)["table"], full)


def test_a04_stock_loses_shards_in_its_safetensors_files(tmp_path: Path) -> None:
    full = torch.arange(1, 21, dtype=torch.float32).reshape(4, 5)
    kind = stock().filesystem.SerializationFormat.SAFETENSORS
    stock_save({"table": _two_shards(full)}, tmp_path, serialization_format=kind)
    (path,) = data_files(tmp_path)
    with safe_open(path, "pt") as stored:
        assert {name: stored.get_slice(name).get_shape() for name in stored.keys()} == {"table": [4, 3]}  # noqa: SIM118
    with pytest.raises(ValueError, match="layout='raw'"):
        dcp.FileSystemWriter(tmp_path, serialization_format=dcp.filesystem.SerializationFormat.SAFETENSORS)
