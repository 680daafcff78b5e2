"""Resharding of one tensor from any mesh and placements to any other, on the ranks."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import dcp_all as dcp
from dcp_core.testing.sharding import distribute
from integration_tests.oracle.kinds import filled, mesh_of, same_bits, zeros

__all__ = ["Case", "Layout", "reshard"]


@dataclass(frozen=True)
class Layout:
    """A mesh over the first ranks, and what each of its dimensions does: a tensor dimension to split, or None."""

    mesh: tuple[int, ...]
    dims: tuple[int | None, ...]
    strided: bool = False
    """Split the first dimension as FSDP over tensor parallel does, where both mesh dimensions split the same one."""


@dataclass(frozen=True)
class Case:
    """One tensor, saved in one layout and loaded in another."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    saved: Layout
    loaded: Layout
    files: str


def distributed(case: Case, layout: Layout) -> Any:
    """The tensor of the case on this rank; ranks outside the mesh hold nothing of it."""
    mesh = mesh_of(layout.mesh)
    placements: list[Any] = [Replicate() if dim is None else Shard(dim) for dim in layout.dims]
    if layout.strided and len(set(layout.dims)) == 1 and layout.dims[0] is not None and len(layout.mesh) == 2:
        placements[0] = _StridedShard(layout.dims[0], split_factor=layout.mesh[1])
    return distribute(filled(case.shape, case.dtype), mesh, placements)


def reshard(cases: list[Case]) -> list[str]:
    """Save and load each case; `ok` or what went wrong, for each."""
    outcomes = []
    for case in cases:
        folders = [tempfile.mkdtemp(dir="/dev/shm") if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folders)
        folder = Path(str(folders[0]))
        try:
            outcomes.append(_reshard(case, folder))
        except Exception as error:  # noqa: BLE001 - the outcome is what the test looks at
            outcomes.append(f"{type(error).__name__}: {error}")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    return outcomes


def _reshard(case: Case, folder: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(folder, sync_files=False, layout=case.files)
        dcp.save({"t": distributed(case, case.saved)}, storage_writer=writer)
        wanted = distributed(case, case.loaded)
        template = {"t": zeros(wanted)}
        report = dcp.load(template, storage_reader=dcp.FileSystemReader(folder))
    if not same_bits(template["t"], wanted):
        return f"loaded {template['t'].to_local()}, wanted {wanted.to_local()}"
    return "ok" if not report.unverified else f"unverified: {report.unverified}"
