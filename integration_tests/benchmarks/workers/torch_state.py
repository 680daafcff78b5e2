"""A case's state as torch tensors, or as DTensors where ranks share it, and the bytes behind them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from integration_tests.benchmarks.workers.contents import TensorSpec, fill

__all__ = ["as_bytes", "make"]

State = dict[str, torch.Tensor]


def as_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The memory of a tensor's values, of the local ones of a DTensor."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.detach().reshape(-1).view(torch.uint8).numpy()


def make(specs: Sequence[TensorSpec], *, seed: int) -> State:
    """Name → tensor, filled. Every page has been touched."""
    if any(spec.shard is not None for spec in specs):
        return _sharded(specs, seed)
    state = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}
    fill(((spec, as_bytes(state[spec.name])) for spec in specs), seed=seed)
    return state


def _sharded(specs: Iterable[TensorSpec], seed: int) -> State:
    """Each rank makes whole tensors one after the other, and keeps its part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    state: State = {}
    for spec in specs:
        assert spec.shard is not None, "a case is sharded or not"
        whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        fill([(spec, as_bytes(whole))], seed=seed)
        local = whole.chunk(mesh.size(), spec.shard)[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
        state[spec.name] = DTensor.from_local(
            local, mesh, [Shard(spec.shard)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return state
