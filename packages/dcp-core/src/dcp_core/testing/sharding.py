"""Sharded DTensors for tests."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["distribute"]

_WITHOUT_MESSAGES = "src_data_rank" in inspect.signature(distribute_tensor).parameters  # not in torch 2.6


def distribute(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor from a whole tensor that is equal on all ranks, without communication."""
    if _WITHOUT_MESSAGES:
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    shape, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    part = whole[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))].clone()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
