"""Values ↔ payloads: tensors as bytes without a copy where their memory allows it, objects as they come.

What lies around a payload in a file (zip framing, alignment, CRCs) is the engine's matter, not this module's.
"""

from __future__ import annotations

import ctypes
import io
import math
from collections.abc import Sequence

import torch

from dcp_core.errors import DcpError
from dcp_core.tensor_pieces import TensorPieces
from dcp_manifest.items import Framing
from dcp_manifest.requests import Payload

__all__ = [
    "BoxSpan",
    "PayloadError",
    "box_span",
    "bytes_payload",
    "small_bytes",
    "tensor_bytes",
    "tensor_payload",
    "view_box",
]

# Smaller tensors are copied at once: pieces would cost more than their memory.
_SMALL_BYTES = 64 << 10


class PayloadError(DcpError, TypeError):
    """A value that cannot be written as an item."""


def tensor_payload(key: str, tensor: torch.Tensor, *, self_describing: bool = False) -> Payload:
    """The payload of a tensor's values.

    Args:
        key: FQN, for messages.
        tensor: Strided tensor on any device. A contiguous one on the CPU is not copied: its memory must not change
            before the payload is written. Everything else is copied piece by piece while it is written.
        self_describing: Give an archive that names its own dtype instead of bare values.

    Returns:
        A RAW payload; a TORCH_ZIP one for a quantized tensor (its values need their quantizer) or if asked for.

    Raises:
        PayloadError: The tensor has no values in memory (meta) or is not strided.
    """
    tensor = tensor.detach()
    if tensor.is_meta:
        raise PayloadError(f"{key!r} is a meta tensor: it has no values to save; materialise it first")
    if tensor.layout is not torch.strided:
        raise PayloadError(f"{key!r} has layout {tensor.layout}: only strided tensors can be saved; use .to_dense()")
    if tensor.is_quantized or self_describing:
        buffer = io.BytesIO()
        torch.save(tensor.cpu().clone(), buffer)
        return Payload(buffer.getbuffer(), Framing.TORCH_ZIP)
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    data: memoryview | TensorPieces
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        data = tensor_bytes(tensor)
    elif tensor.nbytes > _SMALL_BYTES:
        data = TensorPieces(tensor)
    else:
        data = tensor_bytes(tensor.cpu().resolve_conj().resolve_neg().contiguous())
    return Payload(data, Framing.RAW, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def bytes_payload(data: io.BytesIO | bytes | memoryview) -> Payload:
    """The payload of an object that a planner has turned into bytes."""
    view = data.getbuffer() if isinstance(data, io.BytesIO) else data
    return Payload(view, Framing.OBJECT)


def small_bytes(tensor: torch.Tensor) -> bytes | None:
    """A copy of the bytes of an ordinary tensor, the cheap way; None if they do not lie in a row in this memory."""
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        return None
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes; it stays alive as long as the view."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    # Not reshape(-1): dimensions of size 1 may have any stride, and a view as bytes would refuse that.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


class BoxSpan:
    """Where a box of a row-major chunk lies in the chunk's bytes.

    `start` and `stop` bound the smallest byte range that holds the box; `contiguous` says whether the box fills it;
    `strides` (elements) lay the box out within that range.
    """

    __slots__ = ("contiguous", "start", "stop", "strides")

    def __init__(self, start: int, stop: int, strides: tuple[int, ...], *, contiguous: bool) -> None:
        self.start = start
        self.stop = stop
        self.strides = strides
        self.contiguous = contiguous


def box_span(chunk_sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], item_bytes: int) -> BoxSpan:
    """The byte range of the box at `offsets` with `lengths` (elements) in a row-major chunk of `chunk_sizes`."""
    strides: list[int] = []
    step = 1
    for size in reversed(chunk_sizes):
        strides.append(step)
        step *= size
    strides.reverse()
    count = math.prod(lengths)
    if count == 0:
        return BoxSpan(0, 0, tuple(strides), contiguous=True)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    last = first + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
    return BoxSpan(first * item_bytes, (last + 1) * item_bytes, tuple(strides), contiguous=last - first + 1 == count)


def view_box(data: memoryview, dtype: torch.dtype, lengths: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """The box as a tensor over `data`, which holds its byte range. No copy; do not write to it."""
    if len(data) == 0:
        return torch.empty(tuple(lengths), dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
    return flat.as_strided(tuple(lengths), tuple(strides))
