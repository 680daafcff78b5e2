"""One hash for each whole tensor of a state dict: how the demo tells that two jobs hold the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = ["fingerprints", "tensor_hash"]


def fingerprints(state: Any) -> dict[str, str]:
    """The hash of every tensor in nested dicts and lists, by dotted name; empty on all ranks but 0.

    Ranks: every rank; collective (whole tensors are gathered, one at a time).
    """
    found: dict[str, str] = {}
    for name, tensor in _tensors(state, ()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            found[name] = tensor_hash(whole)
    return found


def tensor_hash(tensor: torch.Tensor) -> str:
    """A hash of shape, dtype and bits of a tensor on the CPU."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.blake2b(raw.data, key=hashlib.sha256(head).digest(), digest_size=16).hexdigest()


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield ".".join(path), value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, (*path, str(key)))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from _tensors(inner, (*path, str(position)))
