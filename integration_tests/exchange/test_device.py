"""Common loads into tensors on devices: pieces that other ranks have read reach the device, all of them once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_ranks.testing.ranks import RankPool
from integration_tests.exchange import counting
from integration_tests.exchange.counting import whole

KINDS = ["plain", "strided", "cast", "mixed", "columns"]  # a mesh needs a backend for its devices


def tensors() -> dict[str, torch.Tensor]:
    return {key: value for key, value in whole().items() if isinstance(value, torch.Tensor)}


def on_device(name: str, kind: str, key: str, value: torch.Tensor) -> Any:
    """A tensor to fill: in the device's memory, but for every second one of `mixed`."""
    device = f"{name}:{dist.get_rank() % torch.get_device_module(name).device_count()}"
    if kind == "strided" and value.ndim == 2:
        return torch.full((value.shape[1], value.shape[0]), 9, dtype=value.dtype, device=device).t()
    if kind == "cast":
        return torch.full_like(value, 9, dtype=torch.float64, device=device)
    if kind == "mixed" and sum(map(ord, key)) % 2:
        return torch.full_like(value, 9)
    return torch.full_like(value, 9, device=device)


def shards_by_columns(name: str, value: torch.Tensor) -> Any:
    """This rank's columns, as a DTensor on its device."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = dist.init_device_mesh(name, (size,))
    local = value.chunk(size, dim=1)
    part = local[rank] if rank < len(local) else value[:, :0]
    placed = torch.full_like(part, 9, device=name, memory_format=torch.contiguous_format)
    return dist.tensor.DTensor.from_local(
        placed, mesh, [dist.tensor.Shard(1)], run_check=False, shape=value.shape, stride=value.stride()
    )


def loaded_together(name: str, folder: str, kind: str) -> tuple[bool, bool, int, int, int]:
    """Whether the values are right and the ranks read together; bytes read and received, and read at the store."""
    if kind == "columns":
        template = {key: shards_by_columns(name, value) for key, value in tensors().items() if value.ndim == 2}
    else:
        template = {key: on_device(name, kind, key, value) for key, value in tensors().items()}
    with counting.own_piece_first():  # otherwise a rank that is much faster reads everything
        found = counting.load(folder, template, cooperative=True)
    size, rank = dist.get_world_size(), dist.get_rank()
    right = True
    for key, value in template.items():
        wanted = tensors()[key]
        if kind == "columns":
            parts = wanted.chunk(size, dim=1)
            wanted, ours = parts[rank] if rank < len(parts) else wanted[:, :0], value.to_local()
        else:
            ours = value
        right &= torch.equal(ours.cpu(), wanted.to(ours.dtype))
    taken = sum(stop - start for _, start, stop in found.reads)
    return right, found.report.cooperative, found.report.bytes_read, found.report.bytes_received, taken


@pytest.mark.device
@pytest.mark.parametrize("compression", [None, "auto"])
@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, "gloo") for kind in KINDS[:-1]), *((kind, "device") for kind in KINDS)]
)
def test_pieces_of_other_ranks_reach_the_device(
    ranks: RankPool,
    tmp_path: Path,
    device: str,
    device_backend: str,
    backend: str,
    compression: str | None,
    kind: str,
) -> None:
    world = 2
    if backend == "device":
        backend = device_backend
        if torch.get_device_module(device).device_count() < world:
            pytest.skip(f"{backend} needs a device for each of {world} ranks")
    dcp.save(tensors(), storage_writer=dcp.FileSystemWriter(tmp_path / "saved", compression=compression), no_dist=True)
    found = ranks.run(world, loaded_together, device, str(tmp_path / "saved"), kind, backend=backend)
    assert [one[:2] for one in found] == [(True, True)] * world
    assert all(received for _, _, _, received, _ in found), "every rank was helped by the other"
    read, taken = sum(one[2] for one in found), sum(one[4] for one in found)
    assert read == taken
    stored = sum(file.stat().st_size for file in (tmp_path / "saved").glob("*.distcp"))
    assert taken <= stored, "no byte was read twice"
