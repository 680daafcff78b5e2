"""Tables of a flat state dict: this rank's write items, and tensors that it reads whole."""

from __future__ import annotations

import io
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from dcp_core.objects.object_bytes import check_class
from dcp_core.records.metadata import MetadataIndex
from dcp_core.records.protocols import LoadItemType, ReadItem, WriteItem
from dcp_core.shards.shards import LocalTensor, hook_items, is_ordinary, local_tensor, written_tensor
from dcp_core.tables.metadata_columns import StateRecords
from dcp_core.tables.plan_columns import ColumnBuilder
from dcp_core.tensors.kinds import (
    SCALARS,
    ArchivedTensor,
    archive_quantized,
    archive_wrapper,
    is_dtensor,
    is_quantized_dtype,
    is_wrapper,
)
from dcp_core.tensors.tensor_memory import check_memory, has_memory

Held = torch.Tensor | LocalTensor


@dataclass(slots=True)
class LocalValues:
    """Tensors and objects (FQNs) of a flat state dict."""

    items: list[WriteItem]
    held: dict[str, Held] = field(default_factory=dict)
    """FQN → tensor, except tensors that create write items themselves."""
    objects: list[str] = field(default_factory=list)
    usual: bool = True
    """Whether each part of a box is a slice of the local tensor; not if one is quantized or creates write items."""


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a strided tensor with data, not a subclass or shards."""
    if not isinstance(value, torch.Tensor) or not is_ordinary(value):
        return False
    return value.layout is torch.strided and not (value.is_meta or value.is_nested)


def local_values(state_dict: Mapping[str, Any]) -> LocalValues:
    """Return the table; UnsupportedValueError if a value cannot be saved."""
    values = LocalValues([])
    table = ColumnBuilder()
    own: dict[str, list[WriteItem]] = {}
    known: set[Hashable] = set()
    for fqn, value in state_dict.items():
        if is_plain(value):
            if not has_memory(value):
                check_memory(fqn, value)
            table.add_plain(fqn, value)
            values.usual = values.usual and not value.is_quantized
            values.held[fqn] = value
        elif type(value) in SCALARS:
            values.objects.append(fqn)
        elif hasattr(value, "__create_write_items__") and not is_dtensor(value):
            own[fqn] = hook_items(fqn, value)
            values.usual = False
        elif (held := written_tensor(fqn, value)) is not None:
            values.held[fqn] = held
            values.usual = values.usual and not is_quantized_dtype(held.dtype) and not _is_wrapped(fqn, held, known)
            if held.chunks:
                table.add(fqn, held.properties, held.size, held.chunks, whole=held.whole)
        else:
            values.objects.append(fqn)
    columns = table.columns(values.objects)
    columns.order = tuple(state_dict)
    values.items = columns.items()
    if own:
        values.items = _in_order(state_dict, values.items, own)
    return values


def _in_order(fqns: Iterable[str], items: list[WriteItem], own: Mapping[str, list[WriteItem]]) -> list[WriteItem]:
    given: dict[str, list[WriteItem]] = {}
    for item in items:
        given.setdefault(item.index.fqn, []).append(item)
    return [item for fqn in fqns for item in own.get(fqn) or given.get(fqn, [])]


def _is_wrapped(fqn: str, held: LocalTensor, known: set[Hashable]) -> bool:
    tensor = held.shards[0].get() if held.shards else None
    if tensor is None or not is_wrapper(tensor):
        return False
    form = type(tensor), *map(type, vars(tensor).values())
    if form not in known and not isinstance(tensor, ArchivedTensor):
        check_class(fqn, tensor)
    known.add(form)
    return True


def archive_checked(fqn: str, tensor: torch.Tensor) -> io.BytesIO:
    """Return a wrapper or quantized tensor's archive; UnsupportedValueError if a load would refuse it."""
    if tensor.is_quantized:
        return archive_quantized(fqn, tensor)
    check_class(fqn, tensor)
    return archive_wrapper(fqn, tensor)


def find_ties(held: Iterable[tuple[str, Held]]) -> dict[str, str]:
    """Return alias → first FQN for tensors with boxes that all share memory.

    Only ties that all ranks find are stored.
    """
    values = dict(held)
    first_at: dict[int, str] = {}
    sharing: dict[int, list[str]] = {}
    for fqn, value in values.items():
        if isinstance(value, LocalTensor):
            address = value.shards[0].get().data_ptr() if value.shards else 0
        else:
            address = value.data_ptr()
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


def _signature(fqn: str, value: Held) -> Hashable | None:
    held = value if isinstance(value, LocalTensor) else local_tensor(fqn, value)
    if held is None:
        return None
    marks = [(shard.offsets, _memory(shard.get())) for shard in held.shards]
    # Values without memory (no shard here, or only empty shards) cannot be compared by address.
    if not marks or any(memory is None for _, memory in marks):
        return None
    return held.whole, held.size, tuple(marks)


def _memory(tensor: torch.Tensor) -> Hashable | None:
    if tensor.is_quantized or tensor.numel() == 0 or tensor.is_meta or is_wrapper(tensor):
        return None
    # A conjugated or negated view shares memory with its source but has other values.
    bits = (tensor.is_conj(), tensor.is_neg())
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.size(), tensor.stride(), bits


@dataclass(slots=True)
class ReadColumns:
    """Names of tensors to read whole, and records of other items."""

    records: StateRecords
    names: list[str] = field(default_factory=list)
    others: list[ReadItem] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names) + len(self.others)

    def __iter__(self) -> Iterator[ReadItem]:
        yield from map(self.whole, self.names)
        yield from self.others

    def fits(self, fqn: str, value: object) -> bool:
        """Return whether one equal chunk stores this tensor, which is not sharded."""
        row = self.records.tensors.get(fqn)
        return (
            row is not None
            and is_plain(value)
            and value.shape == self.records.single[row]
            and value.dtype == self.records.dtypes[row]
            and has_memory(value)
        )

    def whole(self, name: str) -> ReadItem:
        """Return the item that reads a tensor whole."""
        lengths = torch.Size(self.records.single[self.records.tensors[name]] or ())
        nothing = torch.Size((0,) * len(lengths))
        index = MetadataIndex(name, nothing, 0)
        return ReadItem(LoadItemType.TENSOR, index, nothing, index, nothing, lengths)
