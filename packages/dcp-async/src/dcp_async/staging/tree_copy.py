"""Deep copies of nested state dicts, whose tensors are copied by a given function."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dcp_core.toolkit import check_memory, is_dtensor, is_plain

__all__ = ["copy_tree"]


def copy_tree(
    state_dict: dict[str, Any], copy_tensors: Callable[[Sequence[str], Sequence[torch.Tensor]], list[torch.Tensor]]
) -> dict[str, Any]:
    """Return a deep copy of a state dict with the same container types, as `copy.deepcopy` makes it.

    An object that occurs several times is copied once.

    Args:
        state_dict: State dict whose objects support `copy.deepcopy`.
        copy_tensors: Function that is called with names and plain tensors (of DTensors, the local tensors), and returns
            copies of the tensors.

    Raises:
        UnsupportedValueError: The storage of a tensor has been freed.
    """
    found = {id(tensor): (name, tensor) for name, tensor in _tensors(state_dict, "")}
    names, sources = [name for name, _ in found.values()], [source for _, source in found.values()]
    copies = copy_tensors(names, list(map(_memory, names, sources)))
    # For `deepcopy`, these are done.
    memo: dict[int, Any] = {id(source): _like(source, copied) for source, copied in zip(sources, copies, strict=True)}
    copied: dict[str, Any] = copy.deepcopy(state_dict, memo)
    return copied


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the strided tensors in nested containers, with their names."""
    if isinstance(value, torch.Tensor):
        local = value._local_tensor if is_dtensor(value) else value  # noqa: SLF001
        if is_plain(local) and not local.is_quantized:
            yield name, value
        return
    prefix = f"{name}." if name else ""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{prefix}{key}")
    elif isinstance(value, list | tuple | set):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{prefix}{number}")


def _memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    local = tensor._local_tensor if is_dtensor(tensor) else tensor  # noqa: SLF001
    check_memory(name, local)
    return local.detach().resolve_conj().resolve_neg()


def _like(source: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    if is_dtensor(source):
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - imported long since, as there is one

        return DTensor(copied, source._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return copied
