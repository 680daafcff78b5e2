"""Which local tensors hold data that can be saved and filled; errors say why not, and what to do."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcp_core.errors import UnsupportedValueError

__all__ = ["check_tensor"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def check_tensor(fqn: str, tensor: torch.Tensor, *, allow_meta: bool = False) -> None:
    """Accept a strided tensor whose elements are in its own memory.

    Args:
        fqn: Name for the message.
        tensor: No DTensor, no ShardedTensor.
        allow_meta: Accept tensors on the meta device.

    Raises:
        UnsupportedValueError: It is on the meta device, sparse, nested, or of a class that keeps its data elsewhere.
    """
    reason = _of_subclass(tensor) if type(tensor) not in _PLAIN else None
    if reason is None:
        reason = _of_layout(tensor, allow_meta=allow_meta)
    if reason is not None:
        raise UnsupportedValueError(f"{fqn!r} {reason}")


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
