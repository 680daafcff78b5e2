"""Table of this rank's values of a flat state dict, as columns; and detection of tied values."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import torch

from dcp_core.records.metadata import ChunkStorageMetadata, TensorProperties
from dcp_core.records.plan import WriteItem
from dcp_core.shards.shards import LocalTensor, local_tensor, write_items
from dcp_core.shards.tensor_checks import check_memory
from dcp_core.tables.metadata_columns import dtype_name, flag_bits
from dcp_core.tables.plan_columns import PlanColumns
from dcp_core.tensors.dtensors import is_dtensor
from dcp_core.tensors.quantized import is_quantized_dtype
from dcp_manifest.index.columns import CheckpointIndex

__all__ = ["Held", "LocalValues", "Table", "find_ties", "is_plain", "local_values"]

Held = torch.Tensor | LocalTensor
"""A rank's local part of a tensor: plain tensors stand for themselves."""


@dataclass(slots=True)
class LocalValues:
    """The local values of a flat state dict on this rank."""

    items: list[WriteItem]
    """Items that this rank could write, replicas included; lazy unless a value decides on its items itself."""
    held: dict[str, Held] = field(default_factory=dict)
    """Local parts of the tensors, except those that decide on their items themselves."""
    objects: list[str] = field(default_factory=list)
    usual: bool = True
    """No value decides on its items itself, and none is quantized: a part of a box is a slice of the local tensor."""


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is an ordinary strided tensor with data, of no special class, that declares no shards."""
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        return False
    return value.layout is torch.strided and not (value.is_meta or value.is_nested or hasattr(value, "global_shape"))


def local_values(state_dict: Mapping[str, Any]) -> LocalValues:
    """Return the table of this rank's values of a flat state dict.

    Raises:
        UnsupportedValueError: A value cannot be saved; names it and what to do.
    """
    values = LocalValues([])
    table = Table()
    own: dict[str, list[WriteItem]] = {}
    for fqn, value in state_dict.items():
        if is_plain(value):
            check_memory(fqn, value)
            table.add_plain(fqn, value)
            values.usual = values.usual and not value.is_quantized
            values.held[fqn] = value
        elif hasattr(value, "__create_write_items__") and not is_dtensor(value):
            own[fqn] = write_items(fqn, value)
            values.usual = False
        elif (held := local_tensor(fqn, value)) is not None:
            values.held[fqn] = held
            values.usual = values.usual and not is_quantized_dtype(held.dtype)
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


class Table:
    """Builder of a value table: collects the rows of tensors and objects, and makes its columns."""

    def __init__(self) -> None:
        self._dtypes: dict[torch.dtype, int] = {}
        self._names: list[str] = []
        self._kinds: list[tuple[int, int, int, int, int]] = []  # dtype, flags, dimensions, chunks, whole
        self._shapes: list[int] = []
        self._offsets: list[int] = []
        self._sizes: list[int] = []

    def add_plain(self, fqn: str, tensor: torch.Tensor) -> None:
        """Add an ordinary tensor: one chunk, all of it."""
        shape = tensor.shape
        dims = len(shape)
        self._names.append(fqn)
        flags = tensor.requires_grad | tensor.is_pinned() << 1
        self._kinds.append((self._dtypes.setdefault(tensor.dtype, len(self._dtypes)), flags, dims, 1, 1))
        if dims:
            self._shapes.extend(shape)
            self._sizes.extend(shape)
            self._offsets.extend((0,) * dims)

    def add(
        self,
        fqn: str,
        properties: TensorProperties,
        size: Sequence[int],
        chunks: Sequence[ChunkStorageMetadata],
        *,
        whole: bool,
    ) -> None:
        """Add any tensor; one without chunks is left out."""
        if not chunks:
            return
        self._names.append(fqn)
        dtype = self._dtypes.setdefault(properties.dtype, len(self._dtypes))
        self._kinds.append((dtype, flag_bits(properties), len(size), len(chunks), whole))
        self._shapes.extend(size)
        for chunk in chunks:
            self._offsets.extend(chunk.offsets)
            self._sizes.extend(chunk.sizes)

    def columns(self, objects: list[str], object_bytes: Sequence[int] | None = None) -> PlanColumns:
        """Return the columns of all added tensors, and the objects, with their sizes if they are known."""
        kinds = np.array(self._kinds, np.int64).reshape(-1, 5)
        index = CheckpointIndex(
            dtypes=tuple(map(dtype_name, self._dtypes)),
            tensor_names=self._names,
            tensor_dtype=kinds[:, 0].astype(np.uint8),
            tensor_flags=kinds[:, 1].astype(np.uint8),
            tensor_ndim=kinds[:, 2].astype(np.uint8),
            tensor_owner=np.zeros(len(kinds), np.uint32),
            tensor_shape=np.array(self._shapes, np.int64),
            tensor_chunks=kinds[:, 3].copy(),
            chunk_offsets=np.array(self._offsets, np.int64),
            chunk_sizes=np.array(self._sizes, np.int64),
            object_names=objects,
            object_owner=np.zeros(len(objects), np.uint32),
        )
        sizes = np.full(len(objects), -1, np.int64) if object_bytes is None else np.array(object_bytes, np.int64)
        return PlanColumns(index, kinds[:, 4].astype(np.uint8), sizes)


def find_ties(held: Iterable[tuple[str, Held]]) -> dict[str, str]:
    """Find tied values, to be stored once: alias → first name, for those whose boxes are all in the same memory.

    Ranks: every rank; the answers of the ranks may differ, and only what all agree on is a tie of the job.
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
    """Return a key that is equal for tied values; None where memory does not decide."""
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
