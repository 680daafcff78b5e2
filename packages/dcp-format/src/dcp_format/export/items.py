"""Write items as tensors of a safetensors file: dtype and sizes that an item is planned with, and its checked bytes."""

from __future__ import annotations

import torch

from dcp_core import TensorWriteData, WriteItem
from dcp_core.errors import DcpError, UnsupportedValueError
from dcp_core.toolkit import tensor_payload
from dcp_io import Payload
from dcp_manifest import Framing

__all__ = ["checked_payload", "form_of", "tensor_data_of"]


def tensor_data_of(item: WriteItem) -> TensorWriteData:
    """Return an item's chunk and properties. Raises UnsupportedValueError if the item is not a tensor."""
    if item.tensor_data is None:
        raise UnsupportedValueError(f"{item.index.fqn!r} is no tensor, and safetensors holds tensors only")
    return item.tensor_data


def form_of(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    """Return the name of the dtype, and the sizes in elements, of the box that an item writes."""
    data = tensor_data_of(item)
    return str(data.properties.dtype).removeprefix("torch."), tuple(data.chunk.sizes)


def checked_payload(item: WriteItem, data: object) -> Payload:
    """Return the bytes of an item's tensor, after checking that they are as planned.

    Args:
        item: The item.
        data: What the planner's `resolve_data` returned for it.

    Raises:
        UnsupportedValueError: The planner returned bytes instead of a tensor.
        DcpError: The tensor has another dtype or other sizes than planned.
    """
    if not isinstance(data, torch.Tensor):
        raise UnsupportedValueError(f"the planner gave bytes for {item.index.fqn!r}; safetensors holds tensors")
    payload = tensor_payload(item.index.fqn, data)
    dtype, sizes = form_of(item)
    if payload.framing is not Framing.RAW or (payload.dtype, payload.sizes) != (dtype, sizes):
        raise DcpError(
            f"{item.index.fqn!r} was planned as {dtype} of sizes {sizes} and resolved to {payload.dtype} of sizes "
            f"{payload.sizes}: safetensors needs to know before"
        )
    return payload
