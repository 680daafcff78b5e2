"""Table of this rank's tensors and objects in a flat state dict, as columns, and detection of tied tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from dcp_core.records.plan import WriteItem
from dcp_core.shards.shards import LocalTensor, hook_items, local_tensor
from dcp_core.shards.tensor_checks import check_memory
from dcp_core.tables.column_builder import ColumnBuilder
from dcp_core.tensors.dtensors import is_dtensor
from dcp_core.tensors.quantized import is_quantized_dtype

__all__ = ["Held", "LocalValues", "find_ties", "is_plain", "local_values"]

Held = torch.Tensor | LocalTensor
"""A tensor on one rank: a plain tensor, or the shards of a sharded tensor as a `LocalTensor`."""


@dataclass(slots=True)
class LocalValues:
    """The tensors and objects of a flat state dict on this rank, with their write items.

    `objects` lists the FQNs of the objects.
    """

    items: list[WriteItem]
    """Write items for all tensors and objects of this rank, including replicas.

    Records are created on access, except if a tensor class creates write items itself (`__create_write_items__`).
    """
    held: dict[str, Held] = field(default_factory=dict)
    """FQN → tensor on this rank, without tensors whose class creates write items itself."""
    objects: list[str] = field(default_factory=list)
    usual: bool = True
    """Whether each part of a tensor's box is a slice of the local tensor.

    False if the class of a tensor creates write items itself, or if a tensor is quantized.
    """


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether an object is an ordinary strided tensor with data: no subclass, no DTensor, no declared shards."""
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        return False
    return value.layout is torch.strided and not (value.is_meta or value.is_nested or hasattr(value, "global_shape"))


def local_values(state_dict: Mapping[str, Any]) -> LocalValues:
    """Return the table of this rank's tensors and objects in a flat state dict (FQN → tensor or object).

    Raises:
        UnsupportedValueError: A tensor or object cannot be saved; the message names the FQN and a remedy.
    """
    values = LocalValues([])
    table = ColumnBuilder()
    own: dict[str, list[WriteItem]] = {}
    for fqn, value in state_dict.items():
        if is_plain(value):
            check_memory(fqn, value)
            table.add_plain(fqn, value)
            values.usual = values.usual and not value.is_quantized
            values.held[fqn] = value
        elif hasattr(value, "__create_write_items__") and not is_dtensor(value):
            own[fqn] = hook_items(fqn, value, value)
            values.usual = False
        elif (held := local_tensor(fqn, value)) is not None:
            values.held[fqn] = held
            values.usual = values.usual and not is_quantized_dtype(held.dtype)
            if held.chunks:
                table.add(fqn, held.properties, held.size, held.chunks, whole=held.whole)
        else:
            values.objects.append(fqn)
    columns = table.columns(values.objects)
    columns.order = tuple(state_dict)
    values.items = columns.items()
    if own:
        given: dict[str, list[WriteItem]] = {}
        for item in values.items:
            given.setdefault(item.index.fqn, []).append(item)
        values.items = [item for fqn in state_dict for item in own.get(fqn) or given.get(fqn, [])]
    return values


def find_ties(held: Iterable[tuple[str, Held]]) -> dict[str, str]:
    """Find tied tensors, whose boxes all share the same memory: alias FQN → FQN of the first of them.

    Args:
        held: Pairs (FQN, tensor on this rank).

    Ranks: every rank; not collective. Ranks may find different ties; only ties that all ranks find are stored as such.
    """
    values = dict(held)
    first_at: dict[int, str] = {}
    sharing: dict[int, list[str]] = {}
    for fqn, value in values.items():
        address = _address(value)
        if address and (first := first_at.setdefault(address, fqn)) is not fqn:
            sharing.setdefault(address, [first]).append(fqn)
    ties: dict[str, str] = {}
    for candidates in sharing.values():
        known: dict[Hashable, str] = {}
        for fqn in candidates:
            signature = _signature(fqn, values[fqn])
            target = fqn if signature is None else known.setdefault(signature, fqn)
            if target != fqn:
                ties[fqn] = target
    return ties


def _address(value: Held) -> int:
    """Return the address of the first box; 0 if there is no memory to compare."""
    if isinstance(value, LocalTensor):
        return value.shards[0].get().data_ptr() if value.shards else 0
    return value.data_ptr()


def _signature(fqn: str, value: Held) -> Hashable | None:
    """Return a key that is equal for tied values; None for values whose memory does not show ties."""
    held = value if isinstance(value, LocalTensor) else local_tensor(fqn, value)
    if held is None:
        return None
    marks = [(shard.offsets, _memory(shard.get())) for shard in held.shards]
    # Without memory (no shard here, or only empty ones) two values cannot be compared by address.
    if not marks or any(memory is None for _, memory in marks):
        return None
    return held.whole, held.size, tuple(marks)


def _memory(tensor: torch.Tensor) -> Hashable | None:
    if tensor.is_quantized or tensor.numel() == 0 or tensor.is_meta:
        return None
    # A conjugated or negated view has the memory of its source but other values.
    bits = (tensor.is_conj(), tensor.is_neg())
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.size(), tensor.stride(), bits
