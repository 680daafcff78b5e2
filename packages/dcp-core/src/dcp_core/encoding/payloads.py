"""Payloads of items: the bytes of a tensor, without a copy if the tensor is contiguous, or of a serialized object.

The framing of a payload in a file (zip records, alignment, CRCs) is added by the storage engine, not by this module.
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
    """A tensor has no data that could be written, such as a meta tensor, or is not strided."""


def tensor_payload(key: str, tensor: torch.Tensor, *, self_describing: bool = False) -> Payload:
    """Return the payload that writes a tensor's elements.

    Args:
        key: FQN of the tensor, for error messages.
        tensor: Strided tensor on any device. The payload refers to the memory of a contiguous CPU tensor, which must
            not change before the payload is written. Other tensors are copied in pieces during writing.
        self_describing: Whether the payload is a `torch.save` archive, which records dtype and shape, instead of the
            bare bytes of the elements.

    Returns:
        Payload of the bare bytes (`Framing.RAW`), or of a `torch.save` archive (`Framing.TORCH_ZIP`) if
        `self_describing` is True or the tensor is quantized.

    Raises:
        PayloadError: The tensor is on the meta device or is not strided.
        UnsupportedValueError: The storage of the tensor has been freed, or a quantized tensor has no quantizer.
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
    """Return the payload that writes the bytes of an object that a planner has serialized."""
    view = data.getbuffer() if isinstance(data, io.BytesIO) else data
    return Payload(view, Framing.OBJECT)
