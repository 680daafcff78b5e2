"""Write requests for the items of a save plan, each with a function that provides the item's bytes during writing."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch

from dcp_core.encoding.payloads import PayloadError, bytes_payload, tensor_payload
from dcp_core.records.abilities import SavePlannerAbilities, abilities
from dcp_core.records.plan import WriteItem
from dcp_core.records.protocols import SavePlanner
from dcp_core.tables.plan_columns import PlanColumns, object_item
from dcp_core.tables.records_of_index import dtype_of
from dcp_core.tables.value_table import is_plain
from dcp_core.tensors.tensor_bytes import small_bytes, tensor_bytes
from dcp_io.requests import Payload, Writable, WriteRequest
from dcp_manifest.index.items import Framing

__all__ = ["column_requests"]

# Copying a tensor of so few bytes is cheaper than a view.
_SMALL_BYTES = 4 << 10


def _item_request(item: WriteItem, planner: SavePlanner) -> WriteRequest:
    """Return the request of one item whose data the planner resolves."""

    def resolve() -> Payload:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            return _tensor_payload(item, data)
        if isinstance(data, io.BytesIO):
            return bytes_payload(data)
        raise PayloadError(
            f"the planner gave a {type(data).__qualname__} for {item.index.fqn!r}; it must be a tensor or a BytesIO"
        )

    return WriteRequest(item.index.fqn, item.chunk_bytes(), resolve)


def column_requests(columns: PlanColumns, planner: SavePlanner) -> Iterator[Writable]:
    """Yield a write request for each item of a save plan, in the order of the plan.

    If the planner provides `plain_values`, no `WriteItem` records are created for ordinary tensors. Tensors that come
    from a feed, in the planner's `fed_tensors`, get urgent requests.
    """
    can = abilities(planner, SavePlannerAbilities)
    find, fed = can.plain_values, can.fed_tensors
    values: Mapping[str, Any] = (find() if find is not None else None) or {}
    index = columns.index
    dtypes = [dtype_of(name) for name in index.dtypes]
    rows = zip(index.tensor_names, index.tensor_dtype.tolist(), columns.shapes, columns.whole.tolist(), strict=True)
    kinds: dict[tuple[int, tuple[int, ...]], _SmallTensors] = {}
    for row, (name, dtype, shape, whole) in enumerate(rows):
        value = values.get(name) if whole and (fed is None or name not in fed.names) else None
        if not _is_as_planned(value, dtypes[dtype]):
            comes = fed is not None and name in fed.names
            for item in columns.tensor_items(row):
                yield fed.request(item) if comes else _item_request(item, planner)
            continue
        nbytes = math.prod(shape) * dtypes[dtype].itemsize
        alike = kinds.get((dtype, shape)) if 0 < nbytes <= _SMALL_BYTES else None
        if alike is None and 0 < nbytes <= _SMALL_BYTES:
            alike = kinds[dtype, shape] = _SmallTensors(index.dtypes[dtype], shape)
        yield _WholeTensor(name, nbytes, value, index.dtypes[dtype], shape, alike)
    for name, nbytes in zip(index.object_names, columns.object_bytes.tolist(), strict=True):
        yield _item_request(object_item(name, nbytes), planner)


def _is_as_planned(value: object, dtype: torch.dtype) -> TypeGuard[torch.Tensor]:
    """Whether a value is an ordinary tensor of the planned dtype; a planner may have planned another dtype."""
    return is_plain(value) and not value.is_quantized and value.dtype is dtype


@dataclass(slots=True, eq=False)
class _SmallTensors:
    """Small ordinary tensors of one dtype and one shape; satisfies `dcp_manifest.Alike`."""

    dtype: str
    sizes: tuple[int, ...]

    def resolve(self, requests: Sequence[_WholeTensor]) -> bytes | memoryview:
        """Copy the bytes of all the tensors at once; from a device with one transfer."""
        tensors = [request.tensor for request in requests]
        dtype, device = dtype_of(self.dtype), tensors[0].device
        if all(each.dtype is dtype and each.shape == self.sizes and each.device == device for each in tensors):
            with torch.no_grad():
                return tensor_bytes(torch.stack(tensors).cpu())
        return b"".join([cast("bytes", request.resolve().data) for request in requests])


@dataclass(slots=True)
class _WholeTensor:
    """The request of an ordinary tensor: one object instead of a function and its arguments."""

    key: str
    cost_bytes: int
    tensor: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    alike: _SmallTensors | None

    def resolve(self) -> Payload:
        """Return the payload of the tensor's bytes: a copy of a small one, a view of a large one."""
        tensor, nbytes = self.tensor, self.cost_bytes
        if tensor.shape != self.shape or tensor.nbytes != nbytes:
            raise PayloadError(f"{self.key!r} was planned with sizes {self.shape} but has {tuple(tensor.shape)} now")
        if nbytes <= _SMALL_BYTES and (data := small_bytes(tensor)) is not None:
            return Payload(data, Framing.RAW, self.dtype, self.shape)
        return tensor_payload(self.key, tensor)


def _tensor_payload(item: WriteItem, tensor: torch.Tensor) -> Payload:
    """Return the payload of a resolved tensor, framed so that the index (which is made from the plan) stays true."""
    planned = item.tensor_data
    if planned is None:
        raise PayloadError(f"the planner gave a tensor for {item.index.fqn!r}, which was planned as an object")
    if tuple(tensor.shape) != tuple(planned.chunk.sizes):
        raise PayloadError(
            f"{item.index.fqn!r} was planned with sizes {tuple(planned.chunk.sizes)} but resolved to "
            f"{tuple(tensor.shape)}; change the plan's tensor_data together with the data"
        )
    # A planner may convert in resolve_data without a change of its plan: such an item carries its own dtype.
    return tensor_payload(item.index.fqn, tensor, self_describing=tensor.dtype != planned.properties.dtype)
