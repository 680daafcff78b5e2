"""Copies from the bytes of a stored chunk to a tensor with a box of it, also strided, of another dtype or device.

The bytes come in pieces of any length and in any order; a piece is copied as a handful of boxes. Reading them, and the
decision to read into memory directly, are in `storage_reader`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

__all__ = ["BoxCopy", "element_boxes"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
Copy = Callable[[torch.Tensor, torch.Tensor], None]


def element_boxes(sizes: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield elements [start, stop) of a row-major array as boxes (offsets, lengths), ascending; at most 2·ndim - 1.

    Args:
        sizes: Sizes of the array, which has one dimension or more; no size is 0.
        start: First element, at least 0.
        stop: End of the elements, more than `start` and at most the number of elements.
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
    """Fills a tensor, which is a box of a chunk, from the chunk's pieces.

    Args:
        sizes: Sizes of the chunk, in elements.
        dtype: Dtype of the stored elements.
        offsets: Start of the box in the chunk, in elements.
        target: Tensor of the box's sizes; any strides, dtype and device.
        copy: Function that copies a source tensor, which is only valid during the call, into a part of the target.

    Thread-safe: several pieces may be copied at a time.
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
        """Copy the box's part of the chunk's bytes from `position` on; `data` begins and ends between elements."""
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
