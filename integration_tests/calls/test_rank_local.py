"""Saves without collectives: each rank by itself, one checkpoint in the end, never a stale or a partial one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp_all as dcp
from dcp_core.testing.sharding import distribute
from integration_tests import failing

PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
FULL = torch.arange(1, 57, dtype=torch.float32).reshape(7, 8)


def _tensor(value: float, placement: str) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute(FULL * value, mesh, [PLACEMENTS[placement]])


def _state(value: float, placement: str = "rows") -> dict[str, Any]:
    return {"w": _tensor(value, placement), "plain": torch.full((3,), value), "step": int(value)}


def _save(folder: str, value: float, use_collectives: bool, placement: str = "rows") -> str:
    state = _state(value, placement)
    metadata = dcp.save(state, checkpoint_id=folder, use_collectives=use_collectives)
    return str(metadata.storage_meta.save_id if metadata.storage_meta else None)


def _value(folder: str, placement: str) -> float:
    """The value of the checkpoint that is loaded here; -1 if anything of it is wrong."""
    state = _state(0.0, placement)
    dcp.load(state, checkpoint_id=folder)
    value = float(state["step"])
    right = torch.equal(state["w"].to_local(), _tensor(value, placement).to_local())
    return value if right and torch.equal(state["plain"], torch.full((3,), value)) else -1.0


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rank_local_save_loads_on_any_number_of_ranks(
    ranks: Any, tmp_path_factory: pytest.TempPathFactory, world: int, placement: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "rank-local-of-two"
    if not folder.exists():
        first, second = ranks.run(2, _save, str(folder), 5.0, False)
        assert first == second != "None"  # the ranks agree on the save's id
    assert ranks.run(world, _value, str(folder), placement) == [5.0] * world
    assert not (folder / ".metadata").exists()


def test_newest_save_wins_whatever_its_kind(ranks: Any, tmp_path: Path) -> None:
    for value, use_collectives in ((1.0, True), (2.0, False), (3.0, False), (4.0, True), (5.0, False)):
        ranks.run(2, _save, str(tmp_path), value, use_collectives)
        for world in (2, 1):
            assert ranks.run(world, _value, str(tmp_path), "columns") == [value] * world, value
        assert float(dcp.load_keys("step", checkpoint_id=tmp_path, no_dist=True)["step"]) == value


def test_replaced_files_are_removed(ranks: Any, tmp_path: Path) -> None:
    for value, use_collectives in ((1.0, True), (2.0, False), (3.0, False)):
        save_id = ranks.run(2, _save, str(tmp_path), value, use_collectives)[0]
    names = failing.listed(str(tmp_path))
    assert [name for name in names if name.endswith(".distcp")] == [f"__{rank}_0.{save_id}.distcp" for rank in (0, 1)]
    assert [name for name in names if "dcp-save" in name] == []
    value, use_collectives = 4.0, True
    save_id = ranks.run(2, _save, str(tmp_path), value, use_collectives)[0]
    assert failing.listed(str(tmp_path)) == [".metadata", f"__0_0.{save_id}.distcp", f"__1_0.{save_id}.distcp"]


def test_fewer_ranks_than_before(ranks: Any, tmp_path: Path) -> None:
    ranks.run(4, _save, str(tmp_path), 1.0, False)
    ranks.run(2, _save, str(tmp_path), 2.0, False)
    assert ranks.run(2, _value, str(tmp_path), "columns") == [2.0, 2.0]
    ranks.run(4, _save, str(tmp_path), 3.0, False)
    assert ranks.run(1, _value, str(tmp_path), "whole") == [3.0]


def test_rank_that_is_missing_is_named(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, _save, str(tmp_path), 1.0, False)
    for name in os.listdir(tmp_path):
        if name.startswith("__1") and name.endswith(".metadata"):
            (tmp_path / name).unlink()
    with pytest.raises(dcp.CheckpointNotFoundError, match="1"):
        dcp.load({"step": 0}, checkpoint_id=tmp_path, no_dist=True)


def _part(folder: str) -> None:
    """Each rank saves its rows, but the last rank's are left out of the state."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state: dict[str, Any] = {"step": 1}
    if rank < world - 1:
        state["w"] = _tensor(1.0, "rows")
    dcp.save(state, checkpoint_id=folder, use_collectives=False)


def test_hole_is_named(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, _part, str(tmp_path))
    with pytest.raises(dcp.LoadMismatchError, match=r"'w': the checkpoint has no data for \[4:7, 0:8\]"):
        dcp.load({"w": torch.zeros(7, 8)}, checkpoint_id=tmp_path, no_dist=True)
    top = {"step": 0}
    dcp.load(top, checkpoint_id=tmp_path, no_dist=True)
    assert top == {"step": 1}


def _fail_on_one(folder: str) -> tuple[str, list[str]]:
    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if dist.get_rank() == 1:
                raise OSError("failed on purpose")
            return super().resolve_data(write_item)

    try:
        dcp.save(_state(2.0), checkpoint_id=folder, planner=Failing(), use_collectives=False)
    except dcp.CheckpointException as error:
        return str(error), failing.listed(folder)
    return "saved", []


@pytest.mark.parametrize("before", [True, False])
def test_failure_of_one_rank_leaves_the_checkpoint_before(ranks: Any, tmp_path: Path, before: bool) -> None:
    ranks.run(2, _save, str(tmp_path), 1.0, before)
    for text, _ in ranks.run(2, _fail_on_one, str(tmp_path)):
        assert "failed on rank 1" in text
        assert "OSError: failed on purpose" in text
    assert ranks.run(2, _value, str(tmp_path), "columns") == [1.0, 1.0]
    ranks.run(2, _save, str(tmp_path), 3.0, False)
    assert ranks.run(2, _value, str(tmp_path), "columns") == [3.0, 3.0]


def _save_different_ids(folder: str) -> str:
    try:
        dcp.save(_state(1.0), checkpoint_id=f"{folder}/{dist.get_rank()}", use_collectives=False)
    except dcp.DcpError as error:
        return str(error)
    return "saved"


def test_ranks_that_name_different_checkpoints_are_told_so(ranks: Any, tmp_path: Path) -> None:
    for text in ranks.run(2, _save_different_ids, str(tmp_path)):
        assert f"{tmp_path}/0" in text
        assert f"{tmp_path}/1" in text
    assert list(tmp_path.iterdir()) == []
