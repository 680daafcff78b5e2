"""Bytes of a tensor in pieces, for writing tensors that are not contiguous in CPU memory.

From a CUDA device, the next piece is copied while a piece is being written, with two pinned buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from dcp_core.tensors.element_copy import as_copyable

__all__ = ["TensorPieces"]


# A piece is checksummed and written while it is in the processor's cache; a larger one would gain nothing.
_HOST_PIECE_BYTES = 4 << 20


class TensorPieces:
    """The row-major bytes of a strided tensor of any strides and device, in pieces; implements `dcp_io.PiecewiseData`.

    Args:
        tensor: Detached tensor; conjugate and negative views are resolved in the pieces.
    """

    __slots__ = ("_tensor", "nbytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = as_copyable(tensor)
        self.nbytes: int = tensor.numel() * tensor.dtype.itemsize

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of the tensor in order; each piece is valid until the next piece is requested.

        Args:
            max_bytes: Largest size in bytes of the buffer for a piece, unless a single element is larger.
        """
        if self._tensor.is_cuda:
            return _from_cuda(self._tensor, max_bytes)
        return _by_host(self._tensor, max_bytes)


def _by_host(tensor: torch.Tensor, max_bytes: int) -> Iterator[memoryview]:
    limit = max(1, min(max_bytes, _HOST_PIECE_BYTES) // tensor.dtype.itemsize)
    buffer = torch.empty(min(limit, tensor.numel()), dtype=tensor.dtype, device="cpu")
    for part in _parts(tensor, limit):
        yield _bytes(_fill(buffer, part))


def _from_cuda(tensor: torch.Tensor, max_bytes: int) -> Iterator[memoryview]:
    limit = max(1, max_bytes // 2 // tensor.dtype.itemsize)
    count = min(limit, tensor.numel())
    buffers = [torch.empty(count, dtype=tensor.dtype, pin_memory=True, device="cpu") for _ in range(2)]
    copied = [torch.cuda.Event() for _ in buffers]  # type: ignore[no-untyped-call]
    stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    # The kernel that computes the tensor may still be running.
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    waiting: tuple[torch.Tensor, torch.cuda.Event] | None = None
    for number, part in enumerate(_parts(tensor, limit)):
        event = copied[number % 2]
        with torch.cuda.stream(stream):
            filled = _fill(buffers[number % 2], part)
            event.record(stream)
        if waiting is not None:
            waiting[1].synchronize()
            yield _bytes(waiting[0])
        waiting = filled, event
    if waiting is not None:
        waiting[1].synchronize()
        yield _bytes(waiting[0])


def _fill(buffer: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    filled = buffer[: part.numel()]
    filled.view(part.shape).copy_(part, non_blocking=True)
    return filled


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _parts(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield views that make up the tensor in row-major order, each of at most `limit` elements."""
    if tensor.numel() <= limit:
        yield tensor
        return
    row = math.prod(tensor.shape[1:])
    step = max(1, limit // row)
    for start in range(0, tensor.size(0), step):
        part = tensor[start : start + step]
        if part.numel() <= limit:
            yield part
        else:
            yield from _parts(part[0], limit)
