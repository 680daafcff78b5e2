"""Copying of tensors into an arena, in parallel threads that release Python's global interpreter lock.

The layout in the arena is decided in `placement`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from dcp_async.staging.placement import Placement
from dcp_core.toolkit import copy_elements

__all__ = ["Copier", "arena_view", "copied_strides", "on_this_stream"]

T = TypeVar("T")

_SLICE_BYTES = 16 << 20
_LARGE_BYTES = 1 << 20


def arena_view(
    memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a tensor with this dtype, shape and stride in elements: a view at a byte offset of an arena's memory."""
    made = torch.empty(0, dtype=dtype, device="cpu")  # the caller may have another default device
    made.set_(memory.untyped_storage(), offset // dtype.itemsize, shape, stride)
    return made


def copied_strides(shape: Sequence[int], strides: tuple[int, ...], *, compact: bool) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor's copy: the strides of the tensor, or contiguous if `compact`."""
    return torch.empty(shape, device="meta").stride() if compact else strides


def on_this_stream(function: Callable[[], T]) -> Callable[[], T]:
    """Wrap a function for another thread: its CUDA copies run after the work on the calling thread's current stream."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return function
    stream = torch.cuda.current_stream()

    def call() -> T:
        with torch.cuda.stream(stream):
            return function()

    return call


class Copier:
    """Copier of tensors into an arena, with several threads.

    Args:
        threads: Number of threads that copy at the same time, including the calling thread.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="dcp-copy") if threads > 1 else None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, placement: Placement, tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        """Copy tensors into an arena's memory at the offsets in `placement`; the copies are complete on return."""
        begin = memory.data_ptr()
        sources, offsets, lengths = (each.tolist() for each in placement.pieces)
        waiting = [self._copy_one(tensors[row], placement, row, memory) for row in placement.by_tensor.tolist()]
        large = [
            cut
            for source, offset, length in zip(sources, offsets, lengths, strict=True)
            if length >= _LARGE_BYTES
            for cut in _slices(begin + offset, source, length)
        ]
        others = self._start_others(large)
        move = ctypes.memmove
        for source, offset, length in zip(sources, offsets, lengths, strict=True):
            if length < _LARGE_BYTES:
                move(begin + offset, source, length)
        _drain(large)
        for each in others:
            each.result()
        for wait in waiting:
            wait()

    def close(self) -> None:
        """End the copying threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _start_others(self, large: list[tuple[int, int, int]]) -> list[Future[None]]:
        if self._pool is None or len(large) < 2:
            return []
        return [self._pool.submit(_drain, large) for _ in range(min(self._threads - 1, len(large) - 1))]

    def _copy_one(
        self, source: torch.Tensor, placement: Placement, row: int, memory: torch.Tensor
    ) -> Callable[[], object]:
        """Start copying a tensor element by element; returns a function that waits for the end of the copy."""
        strides = copied_strides(source.shape, source.stride(), compact=bool(placement.compact[row]))
        source = source.detach()
        target = arena_view(memory, int(placement.offsets[row]), source.dtype, source.shape, strides)
        if source.device.type != "cuda":
            copy_elements(target, source)
            return lambda: None
        stream = self._stream(source.device)
        with torch.cuda.stream(stream):
            copy_elements(target, source, non_blocking=True)
        # The allocator must not give the source's memory away before the copy has read it.
        source.record_stream(stream)
        return stream.synchronize

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream


def _slices(target: int, source: int, length: int) -> Iterator[tuple[int, int, int]]:
    for at in range(0, length, _SLICE_BYTES):
        yield target + at, source + at, min(_SLICE_BYTES, length - at)


def _drain(work: list[tuple[int, int, int]]) -> None:
    """Copy remaining tensors, concurrently with other threads."""
    move = ctypes.memmove
    while work:
        try:
            target, source, length = work.pop()
        except IndexError:
            return
        move(target, source, length)
