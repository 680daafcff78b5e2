"""torchdata's `StatefulDataLoader`, whose position belongs to one rank: on as many ranks, and refused on others."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp

pytest.importorskip("torchdata.stateful_dataloader", reason="nox -s frameworks installs torchdata")

IMPORTS_ALL_OF_TORCH = pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")


def loader_of_this_rank(workers: int) -> Any:
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    # The end of a process group joins threads, which a forked worker does not have: none may be garbage there.
    gc.collect()
    dataset: Any = torch.arange(60)
    sampler: Any = DistributedSampler(dataset, shuffle=False)
    return StatefulDataLoader(dataset, batch_size=2, sampler=sampler, num_workers=workers)


def trained(workers: int, folder: Path, batches: int) -> list[int]:
    """Train on some batches, and save."""
    loader = loader_of_this_rank(workers)
    found = [batch.tolist() for _, batch in zip(range(batches), loader, strict=False)]
    dcp.save({"loader": dcp.PerRank(loader)}, checkpoint_id=folder)
    return [sample for batch in found for sample in batch]


def resumed(workers: int, folder: Path) -> list[int] | str:
    """Load, and train on what is left of the epoch."""
    loader = loader_of_this_rank(workers)
    try:
        dcp.load({"loader": dcp.PerRank(loader, otherwise="error")}, checkpoint_id=folder)
    except dcp.DcpError as error:
        return str(error)
    return [sample for batch in loader for sample in batch.tolist()]


@IMPORTS_ALL_OF_TORCH
@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_goes_on_with_its_own_position(ranks: Any, tmp_path: Path, workers: int) -> None:
    first = ranks.run(2, trained, workers, tmp_path / "save", 4)
    rest = ranks.run(2, resumed, workers, tmp_path / "save")
    for rank in range(2):
        assert first[rank] + rest[rank] == [*range(rank, 60, 2)]
    for other in (1, 3):
        messages = ranks.run(other, resumed, workers, tmp_path / "save")
        expected = f"'loader' has a value per rank, saved by 2 ranks, and this job has {other}"
        assert all(expected in str(message) for message in messages), messages
