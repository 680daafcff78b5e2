"""Memory of tensors: checks, bytes as a view or in pieces, and copies for every dtype."""

from __future__ import annotations

import ctypes
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dcp_core.errors import UnsupportedValueError
from dcp_core.tensors.devices import CopyStream, device_module, pinned_buffer
from dcp_core.tensors.kinds import is_wrapper
from dcp_manifest.index.boxes import intersect

Box = tuple[tuple[int, ...], tuple[int, ...]]
Copy = Callable[[torch.Tensor, torch.Tensor], None]


def element_boxes(sizes: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield at most 2·ndim - 1 boxes (offsets, lengths) with elements [start, stop) of a row-major array."""
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
    """Copies a box of a stored chunk into a tensor, from pieces of the chunk's bytes. Thread-safe.

    `target` has the box's sizes; `copy` must not keep its source.
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
        """Copy a piece, at `position` in bytes."""
        if not len(data):
            return
        flat = torch.frombuffer(data, dtype=torch.uint8).view(self._dtype)
        start = position // self._dtype.itemsize
        for offsets, lengths in element_boxes(self._sizes, start, start + flat.numel()):
            shared = intersect((offsets, lengths), (self._offsets, self._lengths))
            if shared is None:
                continue
            first, extent = shared
            place = sum(begin * stride for begin, stride in zip(first, self._strides, strict=True)) - start
            target = self._target
            for dim, (begin, mine, length) in enumerate(zip(first, self._offsets, extent, strict=True)):
                if length != self._lengths[dim]:
                    target = target.narrow(dim, begin - mine, length)
            self._copy(target, flat.as_strided(extent, self._strides, place))


# Dtypes that every version of PyTorch can copy; other dtypes are copied as integers.
_WITH_KERNEL = frozenset(
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.complex128, torch.complex64, torch.complex32),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4),
    ]
)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or an integer view if PyTorch may not copy the dtype."""
    if tensor.dtype in _WITH_KERNEL or tensor.layout is not torch.strided:
        return tensor
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def copy_elements(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy like `target.copy_(source)`, for every dtype."""
    if target.dtype == source.dtype:
        target, source = as_copyable(target), as_copyable(source)
    target.copy_(source, non_blocking=non_blocking)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor or a contiguous copy, for every dtype."""
    return tensor if tensor.is_contiguous() else as_copyable(tensor).contiguous().view(tensor.dtype)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a strided tensor, or of a contiguous copy, in one dimension."""
    return contiguous(tensor.resolve_conj().resolve_neg()).view(-1).view(torch.uint8)


def copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU copy, for every dtype."""
    copied = as_copyable(tensor).to("cpu", copy=True)
    return copied if copied.dtype == tensor.dtype else copied.view(tensor.dtype)


# Enough slots that reader threads seldom wait; at 2 MiB each they take 16 MiB of pinned memory.
_MAX_SLOTS = 8


class DeviceCopies:
    """Copies CPU buffers to tensors on any device, asynchronously if it has streams. Thread-safe.

    Call `prepare` first, in the thread that uses the tensors: copies run in a separate stream after the current
    stream's work.
    """

    def __init__(self) -> None:
        self._lanes: dict[torch.device, _Lane] = {}
        self._lock = threading.Lock()

    def prepare(self, tensor: torch.Tensor) -> None:
        """Let copies to a tensor run after the calling thread's work on its device."""
        if tensor.is_cpu or (module := device_module(tensor.device)) is None:
            return
        with self._lock:
            lane = self._lanes.get(tensor.device)
            if lane is None:
                lane = self._lanes[tensor.device] = _Lane(module, tensor.device)
        lane.stream.keep(tensor)  # a load that fails may delete the tensor while copies still run

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a CPU tensor; `source` may be changed after this returns."""
        lane = self._lanes.get(target.device)
        with torch.inference_mode(target.is_inference()):  # inference tensors can only be changed in inference mode
            if lane is None:
                copy_elements(target, source)
            else:
                lane.copy(target, source)

    def finish(self, device: torch.device) -> None:
        """Wait for all started copies to a device."""
        lane = self._lanes.get(device)
        if lane is not None:
            lane.finish()


class _Slot:
    def __init__(self, copied: Any) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.copied = copied

    def fill(self, source: torch.Tensor) -> torch.Tensor:
        self.copied.synchronize()
        if self.memory.numel() < source.nbytes:
            self.memory = pinned_buffer(source.nbytes)
        staged = self.memory[: source.nbytes].view(source.dtype).view(source.shape)
        copy_elements(staged, source)
        return staged


class _Lane:
    def __init__(self, module: Any, device: torch.device) -> None:
        self._device = device
        self.stream = CopyStream(module, device)
        self.stream.follow()
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(_MAX_SLOTS):
            self._free.put(_Slot(self.stream.event()))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # FIFO returns the slot with the oldest copy. Threads return slots soon, so none starves.
        slot = self._free.get()
        try:
            with self.stream.entered():
                staged = slot.fill(source)
                if target.dtype != staged.dtype or not target.is_contiguous():
                    # Convert and scatter on the device; on the host, torch would use pageable memory.
                    staged = staged.to(self._device, non_blocking=True)
                copy_elements(target, staged, non_blocking=True)
                self.stream.record(slot.copied)
        finally:
            self._free.put(slot)

    def finish(self) -> None:
        self.stream.synchronize()


def small_bytes(tensor: torch.Tensor) -> bytes | None:
    """Copy an ordinary contiguous CPU tensor's bytes, or return None."""
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        return None
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


class _Memory:
    """Exposes a CPU tensor's memory to numpy."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
        }


# One type for all: creating a type takes longer than viewing twenty tensors.
_SMALL_BYTES = 4096
_SmallMemory = ctypes.c_char * _SMALL_BYTES


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a writable view of a contiguous CPU tensor, which keeps its memory alive."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    # `Tensor.numpy` would forbid resizing the storage forever, which FSDP does.
    if tensor.nbytes > _SMALL_BYTES:
        return memoryview(np.asarray(_Memory(tensor)))  # type: ignore[arg-type]
    memory = _SmallMemory.from_address(tensor.data_ptr())  # half the time of numpy
    memory.tensor = tensor  # type: ignore[attr-defined]  # the view holds the memory, and the memory the tensor
    return memoryview(memory).cast("B")[: tensor.nbytes]


# A piece is checksummed and written while it is in the CPU cache.
_HOST_PIECE_BYTES = 4 << 20


class TensorPieces:
    """The row-major bytes of a detached strided tensor, in pieces."""

    __slots__ = ("_tensor", "nbytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = as_copyable(tensor)
        self.nbytes: int = tensor.numel() * tensor.dtype.itemsize

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes in order, at most `max_bytes` (or one element) at a time, valid until the next piece."""
        module = None if self._tensor.is_cpu else device_module(self._tensor.device)
        if module is None:
            return _by_host(self._tensor, max_bytes)
        return _by_stream(self._tensor, max_bytes, CopyStream(module, self._tensor.device))


def _by_host(tensor: torch.Tensor, max_bytes: int) -> Iterator[memoryview]:
    limit = max(1, min(max_bytes, _HOST_PIECE_BYTES) // tensor.dtype.itemsize)
    buffer = torch.empty(min(limit, tensor.numel()), dtype=tensor.dtype, device="cpu")
    for part in _parts(tensor, limit):
        yield _bytes(_fill(buffer, part, non_blocking=False))


def _by_stream(tensor: torch.Tensor, max_bytes: int, stream: CopyStream) -> Iterator[memoryview]:
    limit = max(1, max_bytes // 2 // tensor.dtype.itemsize)
    count = min(limit, tensor.numel())
    stream.follow()  # what computes the tensor may still be running
    with stream.entered():  # the memory is pinned for this device
        buffers = [pinned_buffer(count * tensor.dtype.itemsize).view(tensor.dtype) for _ in range(2)]
    copied = [stream.event() for _ in buffers]
    waiting: tuple[torch.Tensor, Any] | None = None
    for number, part in enumerate(_parts(tensor, limit)):
        event = copied[number % 2]
        with stream.entered():
            filled = _fill(buffers[number % 2], part, non_blocking=True)
            stream.record(event)
        if waiting is not None:
            waiting[1].synchronize()
            yield _bytes(waiting[0])
        waiting = filled, event
    if waiting is not None:
        waiting[1].synchronize()
        yield _bytes(waiting[0])


def _fill(buffer: torch.Tensor, part: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
    filled = buffer[: part.numel()]
    filled.view(part.shape).copy_(part, non_blocking=non_blocking)
    return filled


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _parts(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
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


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def check_tensor(fqn: str, tensor: torch.Tensor, *, allow_meta: bool = False) -> None:
    """Raise UnsupportedValueError for a tensor without values in strided memory; `allow_meta` excepts meta tensors."""
    reason = _of_subclass(tensor) if type(tensor) not in _PLAIN else None
    if reason is None and tensor.is_meta and not allow_meta:
        reason = "is on the meta device and has no data; materialise it first (`to_empty`, or load into it)"
    elif reason is None and tensor.layout is not torch.strided:
        name = str(tensor.layout).removeprefix("torch.")
        reason = f"is a tensor of layout {name}; convert it with `to_dense()`, or save its parts as tensors"
    elif reason is None and tensor.is_nested:
        reason = "is a nested tensor; save its components (`unbind()`) instead"
    if reason is not None:
        raise UnsupportedValueError(f"{fqn!r} {reason}")
    if not is_wrapper(tensor):
        check_memory(fqn, tensor)


def check_memory(fqn: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedValueError if storage was freed or shrunk."""
    if has_memory(tensor):
        return
    held = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    raise UnsupportedValueError(
        f"{fqn!r} has the sizes {tuple(tensor.shape)}, {tensor.nbytes} bytes, but its storage holds {held}: the memory "
        "was freed or resized (FSDP does so between steps, and `untyped_storage().resize_`); gather the tensor before "
        "you save it or load into it"
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether storage covers a strided tensor."""
    nbytes = tensor.nbytes
    if not nbytes or tensor.is_meta or tensor.is_quantized:
        return True
    if not tensor.is_contiguous():
        spans = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        nbytes = (1 + sum(spans)) * tensor.itemsize
    if tensor.is_cpu and not tensor.data_ptr():  # zero tensors of forward differentiation report a storage
        return False
    return tensor.untyped_storage().nbytes() >= tensor.storage_offset() * tensor.itemsize + nbytes


def _of_subclass(tensor: torch.Tensor) -> str | None:
    name = type(tensor).__qualname__
    if isinstance(tensor, torch.nn.parameter.UninitializedParameter | torch.nn.parameter.UninitializedBuffer):
        return f"is an {name}: run the module once, so that it gets a shape, before you save or load"
    if hasattr(tensor, "fake_mode"):
        return f"is a {name}, which has no data"
    return None
