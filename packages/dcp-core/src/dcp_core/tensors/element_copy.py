"""Copies of tensors of all dtypes, including dtypes for which PyTorch has no copy kernel.

These dtypes are `int1` to `int7`, `uint1` to `uint7` and, in some versions, `float4_e2m1fn_x2`; their elements are
copied as integers of the same size. Conversions between dtypes are left to PyTorch.
"""

from __future__ import annotations

import torch

__all__ = ["as_copyable", "contiguous", "copy_elements", "copy_to_cpu"]

# The dtypes that PyTorch copies in every version and call; for any other, perhaps of a newer version, it is not used.
_WITH_KERNEL = frozenset(
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.complex128, torch.complex64, torch.complex32),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4),
    ]
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; for dtypes that PyTorch may be unable to copy, a view as integers of the same size."""
    if tensor.dtype in _WITH_KERNEL or tensor.layout is not torch.strided:
        return tensor
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def copy_elements(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy the elements of `source` into `target`, like `target.copy_(source)`, for every dtype.

    Args:
        target: Tensor with the sizes of `source`, any strides and any device; may have another dtype if PyTorch can
            convert to it.
        source: Tensor with any strides, on any device.
        non_blocking: Whether the copy may be asynchronous, as for `Tensor.copy_`.
    """
    if target.dtype == source.dtype:
        target, source = as_copyable(target), as_copyable(source)
    target.copy_(source, non_blocking=non_blocking)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it is contiguous, or a contiguous copy, like `Tensor.contiguous`, for every dtype."""
    return tensor if tensor.is_contiguous() else as_copyable(tensor).contiguous().view(tensor.dtype)


def copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor on the CPU, like `Tensor.to("cpu", copy=True)`, for every dtype."""
    copied = as_copyable(tensor).to("cpu", copy=True)
    return copied if copied.dtype == tensor.dtype else copied.view(tensor.dtype)
