"""A copy of nested containers as they are, with copies of their tensors that lie elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dcp_core.dtensors import is_dtensor
from dcp_core.values import is_plain

__all__ = ["copy_tree"]


def copy_tree(
    state_dict: dict[str, Any], copy_tensors: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
) -> dict[str, Any]:
    """A deep copy that keeps the types of containers; what is one object in the source is one in the copy.

    Args:
        state_dict: Anything that can be copied.
        copy_tensors: Copies plain tensors; the local ones of DTensors are among them.
    """
    found = {id(tensor): tensor for tensor in _tensors(state_dict)}
    copies = copy_tensors([_memory(tensor) for tensor in found.values()])
    # For `deepcopy`, these are done.
    memo: dict[int, Any] = {
        number: _like(source, copied) for (number, source), copied in zip(found.items(), copies, strict=True)
    }
    copied: dict[str, Any] = copy.deepcopy(state_dict, memo)
    return copied


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers whose values are the bytes of their memory."""
    if isinstance(value, torch.Tensor):
        local = value._local_tensor if is_dtensor(value) else value  # noqa: SLF001
        if is_plain(local) and not (local.is_quantized or local.is_conj() or local.is_neg()):
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor._local_tensor if is_dtensor(tensor) else tensor).detach()  # noqa: SLF001


def _like(source: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    if is_dtensor(source):
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - imported long since, as there is one

        return DTensor(copied, source._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return copied
