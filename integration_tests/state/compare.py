"""Two state dicts side by side: every difference, by path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["differences"]


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """What differs between two nested values: keys, types, shapes, shardings, any bit of a tensor."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in sorted(ours.keys() | theirs.keys(), key=str):
            if key not in ours or key not in theirs:
                yield f"{path}.{key} only {'theirs' if key in theirs else 'ours'}"
            else:
                yield from differences(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, list | tuple) and type(ours) is type(theirs) and len(ours) == len(theirs):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(mine, other, f"{path}.{index}")
    elif isinstance(theirs, torch.Tensor) and type(ours) is type(theirs):
        yield from _tensor_differences(ours, theirs, path)
    elif type(ours) is not type(theirs) or ours != theirs:
        yield f"{path}: {ours!r}, theirs {theirs!r}"


def _tensor_differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    """Between two tensors of one class."""
    if isinstance(theirs, DTensor):
        if (ours.placements, ours.device_mesh, ours.shape) != (theirs.placements, theirs.device_mesh, theirs.shape):
            yield f"{path}: {ours.placements} {ours.shape}, theirs {theirs.placements} {theirs.shape}"
        else:
            yield from _tensor_differences(ours.to_local(), theirs.to_local(), path)
    elif hasattr(theirs, "local_shards"):
        if ours.metadata() != theirs.metadata():
            yield f"{path}: sharded otherwise"
        for mine, other in zip(ours.local_shards(), theirs.local_shards(), strict=True):
            yield from _tensor_differences(mine.tensor, other.tensor, path)
    elif (ours.dtype, ours.shape, ours.device) != (theirs.dtype, theirs.shape, theirs.device):
        yield f"{path}: {ours.dtype} {ours.shape}, theirs {theirs.dtype} {theirs.shape}"
    elif not torch.equal(ours, theirs):
        yield f"{path}: other values, by up to {(ours - theirs).abs().max()}"
