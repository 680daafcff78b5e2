"""Tied DTensors as templates: one memory takes one value."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_all as dcp
from dcp_ranks.testing.ranks import RankPool

ROWS = 200_000


def load_tied(folder: str) -> tuple[str, list[float]]:
    """Return the error of a load of different values into one DTensor, and what equal ones give."""
    mesh = init_device_mesh("cpu", (2,))

    def filled(value: float) -> DTensor:
        return distribute_tensor(torch.full((ROWS, 2), value), mesh, [Shard(0)])

    dcp.save({"head": filled(1.0), "embedding": filled(2.0), "copy": filled(1.0)}, checkpoint_id=folder)
    shared, error = filled(0.0), ""
    try:
        dcp.load({"head": shared, "embedding": shared}, checkpoint_id=folder)
    except dcp.CheckpointException as raised:
        error = str(raised)
    dcp.load({"head": shared, "copy": shared}, checkpoint_id=folder)
    return error, shared.to_local().unique().tolist()


def test_different_values_for_one_memory_are_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for error, values in ranks.run(2, load_tied, str(tmp_path)):
        assert "'head' and 'embedding' share memory in the template" in error
        assert values == [1.0]
