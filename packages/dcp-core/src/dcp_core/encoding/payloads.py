"""Payloads of values: tensors as bytes, without a copy where their memory layout permits it, and objects as given.

The bytes around a payload in a file (zip framing, alignment, CRCs) are made by the engine, not by this module.
"""

from __future__ import annotations

import io

import torch

from dcp_core.errors import DcpError
from dcp_core.shards.tensor_checks import check_memory
from dcp_core.tensors.element_copy import contiguous
from dcp_core.tensors.quantized import archive_quantized
from dcp_core.tensors.tensor_bytes import tensor_bytes
from dcp_core.tensors.tensor_pieces import TensorPieces
from dcp_io.requests import Payload
from dcp_manifest.index.items import Framing

__all__ = [
    "PayloadError",
    "bytes_payload",
    "tensor_payload",
]

# Smaller tensors are copied at once: pieces would cost more than their memory.
_SMALL_BYTES = 64 << 10


class PayloadError(DcpError, TypeError):
    """A value that cannot be written as an item."""


def tensor_payload(key: str, tensor: torch.Tensor, *, self_describing: bool = False) -> Payload:
    """Return the payload of a tensor's values.

    Args:
        key: FQN of the tensor, for error messages.
        tensor: Strided tensor on any device. A contiguous one on the CPU is not copied: its memory must not change
            before the payload is written. Everything else is copied piece by piece while it is written.
        self_describing: Whether to return a `torch.save` archive, which contains its dtype, instead of bare values.

    Returns:
        A RAW payload; a TORCH_ZIP payload for a quantized tensor (its values need their quantizer) or if
        `self_describing`.

    Raises:
        PayloadError: The tensor has no values in memory (meta) or is not strided.
        UnsupportedValueError: The tensor's storage has been freed, or it is quantized and has no quantizer.
    """
    tensor = tensor.detach()
    if tensor.is_meta:
        raise PayloadError(f"{key!r} is a meta tensor: it has no values to save; materialise it first")
    if tensor.layout is not torch.strided:
        raise PayloadError(f"{key!r} has layout {tensor.layout}: only strided tensors can be saved; use .to_dense()")
    check_memory(key, tensor)
    if tensor.is_quantized or self_describing:
        return Payload(_archive(key, tensor).getbuffer(), Framing.TORCH_ZIP)
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    data: memoryview | TensorPieces
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        data = tensor_bytes(tensor)
    elif tensor.nbytes > _SMALL_BYTES:
        data = TensorPieces(tensor)
    else:
        data = tensor_bytes(contiguous(tensor.cpu().resolve_conj().resolve_neg()))
    return Payload(data, Framing.RAW, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _archive(key: str, tensor: torch.Tensor) -> io.BytesIO:
    if tensor.is_quantized:
        return archive_quantized(key, tensor)
    buffer = io.BytesIO()
    torch.save(tensor.cpu().clone(), buffer)
    return buffer


def bytes_payload(data: io.BytesIO | bytes | memoryview) -> Payload:
    """Return the payload of an object that a planner has serialized."""
    view = data.getbuffer() if isinstance(data, io.BytesIO) else data
    return Payload(view, Framing.OBJECT)
