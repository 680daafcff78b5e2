"""What this rank holds of each value of a flat state dict: its write items, and which values are one and the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_core.plan import WriteItem
from dcp_core.shards import LocalTensor, local_tensor, write_items

__all__ = ["LocalValue", "find_ties", "local_values"]


@dataclass(frozen=True, slots=True)
class LocalValue:
    """One value as this rank sees it."""

    fqn: str
    items: list[WriteItem]
    held: LocalTensor | None
    """None for objects, and for values that decide on their items themselves."""


def local_values(state_dict: Mapping[str, Any]) -> Iterator[LocalValue]:
    """Each value of a flat state dict with the items that this rank holds, in order.

    Raises:
        UnsupportedValueError: A value cannot be saved; names it and what to do.
    """
    for fqn, value in state_dict.items():
        own_items = hasattr(value, "__create_write_items__") and not isinstance(value, DTensor)
        held = None if own_items else local_tensor(fqn, value)
        yield LocalValue(fqn, write_items(fqn, value, held), held)


def find_ties(values: Iterable[LocalValue]) -> dict[str, str]:
    """Tied values, to be stored once: alias → first name, for those whose boxes all lie in the same memory.

    Ranks: every rank; the answers of the ranks may differ, and only what all agree on is a tie of the job.
    """
    first: dict[Hashable, str] = {}
    ties: dict[str, str] = {}
    for value in values:
        signature = _signature(value.held)
        if signature is None:
            continue
        target = first.setdefault(signature, value.fqn)
        if target != value.fqn:
            ties[value.fqn] = target
    return ties


def _signature(held: LocalTensor | None) -> Hashable | None:
    """Equal for values that are one and the same; None where memory does not tell."""
    if held is None:
        return None
    marks = [(shard.offsets, _memory(shard.get())) for shard in held.shards]
    # Without memory (no shard here, or only empty ones) nothing tells two values apart.
    if not marks or any(memory is None for _, memory in marks):
        return None
    return held.whole, held.size, tuple(marks)


def _memory(tensor: torch.Tensor) -> Hashable | None:
    if tensor.is_quantized or tensor.numel() == 0 or tensor.is_meta:
        return None
    # A conjugated or negated view has the memory of its source but other values.
    bits = (tensor.is_conj(), tensor.is_neg())
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.size(), tensor.stride(), bits
