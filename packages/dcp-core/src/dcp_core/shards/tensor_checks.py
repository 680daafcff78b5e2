"""Checks that local tensors have memory that can be saved or loaded into; errors name the reason and a remedy."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcp_core.errors import UnsupportedValueError

__all__ = ["check_memory", "check_tensor", "has_memory"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def check_tensor(fqn: str, tensor: torch.Tensor, *, allow_meta: bool = False) -> None:
    """Raise if a local tensor cannot be saved or loaded into because its elements are not in strided memory.

    Args:
        fqn: FQN of the tensor, for error messages.
        tensor: Tensor that is neither a DTensor nor a ShardedTensor.
        allow_meta: Whether to accept tensors on the meta device.

    Raises:
        UnsupportedValueError: The tensor is on the meta device, sparse or nested, its class keeps the elements in other
            tensors, or its storage has been freed.
    """
    reason = _of_subclass(tensor) if type(tensor) not in _PLAIN else None
    if reason is None:
        reason = _of_layout(tensor, allow_meta=allow_meta)
    if reason is not None:
        raise UnsupportedValueError(f"{fqn!r} {reason}")
    check_memory(fqn, tensor)


def check_memory(fqn: str, tensor: torch.Tensor) -> None:
    """Raise if the storage of a strided tensor is smaller than its shape and strides require.

    Args:
        fqn: FQN of the tensor, for error messages.
        tensor: Strided tensor; meta and quantized tensors are not checked.

    Raises:
        UnsupportedValueError: The storage has been freed or shrunk; reading the tensor would read other memory.
    """
    if has_memory(tensor):
        return
    raise UnsupportedValueError(
        f"{fqn!r} has the sizes {tuple(tensor.shape)}, {tensor.nbytes} bytes, but its storage holds "
        f"{_storage_bytes(tensor)}: the memory was freed or resized (FSDP does so between steps, and "
        "`untyped_storage().resize_`); gather the tensor before you save it or load into it"
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the storage of a tensor is as large as its shape and strides require.

    Args:
        tensor: Strided tensor. For meta tensors, and quantized tensors (which may pack elements), the result is True.
    """
    count = tensor.numel()
    if not count or tensor.is_meta or tensor.is_quantized:
        return True
    if not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _storage_bytes(tensor) >= (tensor.storage_offset() + count) * tensor.dtype.itemsize


def _storage_bytes(tensor: torch.Tensor) -> int:
    # Zero tensors of forward differentiation claim to have a storage, and have none.
    return 0 if tensor.is_cpu and not tensor.data_ptr() else tensor.untyped_storage().nbytes()


def _of_layout(tensor: torch.Tensor, *, allow_meta: bool) -> str | None:
    if tensor.is_meta and not allow_meta:
        return "is on the meta device and has no data; materialise it first (`to_empty`, or load into it)"
    if tensor.layout is not torch.strided:
        name = str(tensor.layout).removeprefix("torch.")
        return f"is a tensor of layout {name}; convert it with `to_dense()`, or save its parts as tensors"
    if tensor.is_nested:
        return "is a nested tensor; save its components (`unbind()`) instead"
    return None


def _of_subclass(tensor: torch.Tensor) -> str | None:
    name = type(tensor).__qualname__
    if isinstance(tensor, torch.nn.parameter.UninitializedParameter | torch.nn.parameter.UninitializedBuffer):
        return f"is an {name}: run the module once, so that it gets a shape, before you save or load"
    wraps: bool = is_traceable_wrapper_subclass(tensor)
    if wraps:
        return f"is a {name}, which wraps other tensors; save those (its `__tensor_flatten__` names them)"
    if hasattr(tensor, "fake_mode"):
        return f"is a {name}, which has no data"
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return f"is a {name}, which keeps its data elsewhere; save the tensors that hold it"
    return None
