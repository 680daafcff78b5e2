"""Copies of a tensor's elements, also of the dtypes that PyTorch has no copy kernel for.

These are `int1` to `int7`, `uint1` to `uint7` and, in some versions and calls, `float4_e2m1fn_x2`. Between tensors of
one such dtype the elements are copied as integers of their size. Conversions between dtypes are left to PyTorch.
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
    """Return the tensor, or a view of its memory as integers of the same size if PyTorch may be unable to copy it."""
    if tensor.dtype in _WITH_KERNEL or tensor.layout is not torch.strided:
        return tensor
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def copy_elements(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy the elements of `source` into `target`, like `Tensor.copy_`, for every dtype.

    Args:
        target: Tensor of the source's sizes, with any strides, on any device; of another dtype if PyTorch can convert
            to it.
        source: Tensor with any strides, on any device.
        non_blocking: Argument of `Tensor.copy_`.
    """
    if target.dtype == source.dtype:
        target, source = as_copyable(target), as_copyable(source)
    target.copy_(source, non_blocking=non_blocking)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy whose elements lie in a row, like `Tensor.contiguous`, for every dtype."""
    return tensor if tensor.is_contiguous() else as_copyable(tensor).contiguous().view(tensor.dtype)


def copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, of any layout, like `Tensor.to("cpu", copy=True)`, for every dtype."""
    copied = as_copyable(tensor).to("cpu", copy=True)
    return copied if copied.dtype == tensor.dtype else copied.view(tensor.dtype)
