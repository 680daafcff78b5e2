"""Copying a box of a stored chunk from the chunk's bytes to a tensor of any strides, dtype and device.

The bytes arrive in pieces of any length and in any order; each piece is copied as a few boxes. Not in this module:
reading the bytes (`read_requests`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

__all__ = ["BoxCopy", "element_boxes"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
Copy = Callable[[torch.Tensor, torch.Tensor], None]


def element_boxes(sizes: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes (offsets, lengths) that together contain elements [start, stop) of a row-major array.

    There are at most 2·ndim - 1 boxes, in ascending order.

    Args:
        sizes: Sizes of the array, which has one dimension or more; no size is 0.
        start: Number of the first element, at least 0.
        stop: Number after the last element; greater than `start`, and at most the number of elements in the array.
    """
    inner = math.prod(sizes[1:])
    first, skipped = divmod(start, inner)
    last, left = divmod(stop, inner)
    if skipped:
        end = left if first == last else inner
        yield from _under(first, element_boxes(sizes[1:], skipped, end))
        if first == last:
            return
        first += 1
    if first < last:
        yield (first, *(0,) * (len(sizes) - 1)), (last - first, *sizes[1:])
    if left:
        yield from _under(last, element_boxes(sizes[1:], 0, left))


def _under(index: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for offsets, lengths in boxes:
        yield (index, *offsets), (1, *lengths)


class BoxCopy:
    """Copier of a box of a stored chunk into a tensor, from pieces of the chunk's bytes. Thread-safe.

    Args:
        sizes: Sizes of the chunk, in elements.
        dtype: Dtype of the stored elements.
        offsets: Start of the box in the chunk, in elements.
        target: Tensor to fill, with the sizes of the box, and any strides, dtype and device.
        copy: Function that copies a source tensor into a view of `target`; the source is valid only during the call.
    """

    __slots__ = ("_copy", "_dtype", "_lengths", "_offsets", "_sizes", "_strides", "_target")

    def __init__(
        self, sizes: Sequence[int], dtype: torch.dtype, offsets: Sequence[int], target: torch.Tensor, copy: Copy
    ) -> None:
        if not sizes:  # a scalar is a row of one
            sizes, offsets, target = (1,), (0,), target.reshape(1)
        self._sizes = tuple(sizes)
        self._dtype = dtype
        self._offsets = tuple(offsets)
        self._lengths = tuple(target.shape)
        self._strides = tuple(math.prod(self._sizes[dim + 1 :]) for dim in range(len(self._sizes)))
        self._target = target
        self._copy = copy

    def piece(self, position: int, data: memoryview) -> None:
        """Copy those elements of a piece of the chunk that are in the box.

        Args:
            position: Offset of the piece in the chunk, in bytes.
            data: Bytes of the piece, which consist of whole elements.
        """
        if not len(data):
            return
        flat = torch.frombuffer(data, dtype=torch.uint8).view(self._dtype)
        start = position // self._dtype.itemsize
        for offsets, lengths in element_boxes(self._sizes, start, start + flat.numel()):
            first = tuple(map(max, offsets, self._offsets))
            extent = [
                min(offset + length, mine + wanted) - begin
                for offset, length, mine, wanted, begin in zip(
                    offsets, lengths, self._offsets, self._lengths, first, strict=True
                )
            ]
            if min(extent) <= 0:
                continue
            place = sum(begin * stride for begin, stride in zip(first, self._strides, strict=True)) - start
            target = self._target
            for dim, (begin, mine, length) in enumerate(zip(first, self._offsets, extent, strict=True)):
                if length != self._lengths[dim]:
                    target = target.narrow(dim, begin - mine, length)
            self._copy(target, flat.as_strided(extent, self._strides, place))
