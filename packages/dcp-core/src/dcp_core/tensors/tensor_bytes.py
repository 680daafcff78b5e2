"""The bytes of a contiguous CPU tensor, as a view or as a copy."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

__all__ = ["small_bytes", "tensor_bytes"]


def small_bytes(tensor: torch.Tensor) -> bytes | None:
    """Return a copy of the bytes of an ordinary contiguous CPU tensor; None for all other tensors."""
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        return None
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


class _Memory:
    """Exposes the memory of a contiguous CPU tensor to numpy, and keeps it alive."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
        }


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a writable view of the bytes of a contiguous CPU tensor; the view keeps the tensor's memory alive."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    # Not `Tensor.numpy`: it would for ever keep the tensor's owner from resizing the storage, as FSDP does.
    return memoryview(np.asarray(_Memory(tensor)))  # type: ignore[arg-type]
