"""Memory of the pretend device: addresses that the host cannot read, and what is stored there.

A tensor is made from a DLPack capsule with DLPack's type of extension devices, the only way from Python to a storage
with an address on such a device. The address lies in a range without access: the host reading it is a segmentation
fault. PyTorch deletes storages while it raises exceptions, when no Python code may run: the capsule's deleter is
`sem_post` of the C library, which counts in the capsule itself, and `Memory.sweep` looks.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from integration_tests.devices.pretend.machine import Event, Stream, machine

__all__ = ["Block", "HostRegistry", "as_strided", "block_of", "borrowed", "empty", "extent", "memory", "on_host"]

_DL_EXTENSION, _DL_UINT = 12, 1
_RANGE_BYTES = 1 << 36
_NORESERVE = 0x4000
_POISON = 0xFF  # NaN in every floating dtype


class Block:
    """Memory of one storage."""

    def __init__(self, device: int, address: int, nbytes: int) -> None:
        self.device, self.address, self.nbytes = device, address, nbytes
        self.data = torch.full((nbytes,), _POISON, dtype=torch.uint8, device="cpu")
        self.stream = machine.stream(device, 0)
        self.users: set[Stream] = set()
        self.capsule: tuple[_DLTensor, Any] | None = None


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_size_t),
        ("device_type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_DELETER = ctypes.cast(_libc.sem_post, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Memory:
    """The memory of all devices: a cache of blocks by stream, as PyTorch's allocators keep it."""

    def __init__(self) -> None:
        self.limits: dict[int, int] = {}
        """Device → the bytes that it has, where a test limits them."""
        self.used: defaultdict[int, int] = defaultdict(int)
        self.peak: defaultdict[int, int] = defaultdict(int)
        self._next: dict[int, int] = {}
        self._blocks: dict[int, Block] = {}
        self._free: defaultdict[tuple[Stream, int], list[Block]] = defaultdict(list)
        self._waiting: list[tuple[list[Event], Block]] = []

    def sweep(self) -> None:
        """Note which storages were deleted."""
        with machine.changed:
            for block in [*self._blocks.values()]:
                if block.capsule is not None and block.capsule[0].data:
                    block.capsule = None
                    self._deleted(block)

    def allocated(self, device: int) -> int:
        """Return the bytes of a device's storages."""
        self.sweep()
        return self.used[device]

    def reserved(self, device: int) -> int:
        """Return the bytes of a device's blocks, used or cached."""
        return sum(block.nbytes for block in [*self._blocks.values()] if block.device == device)

    def tensor(self, nbytes: int, device: int) -> torch.Tensor:
        """Return a new storage as a tensor of bytes."""
        with machine.changed:
            block = self._take(max(1, math.ceil(nbytes / 512)) * 512, device)
            self.used[device] += block.nbytes
            self.peak[device] = max(self.peak[device], self.used[device])
            shape = (ctypes.c_int64 * 1)(nbytes)
            made = _DLTensor(block.address, _DL_EXTENSION, device, 1, _DL_UINT, 8, 1, shape, None, 0, None, _DELETER)
            found: torch.Tensor = torch._C._from_dlpack(_new_capsule(ctypes.addressof(made), b"dltensor", None))
            made.data = 0
            block.capsule = made, shape
        return found

    def block(self, address: int) -> Block:
        """Return the block at a storage's address."""
        return self._blocks[address]

    def empty_cache(self) -> None:
        """Forget blocks that no storage uses."""
        with machine.changed:
            self.sweep()
            self._settle()
            for blocks in self._free.values():
                for block in blocks:
                    del self._blocks[block.address]
            self._free.clear()

    def _take(self, nbytes: int, device: int) -> Block:
        stream = machine.current_stream(device)
        machine.contexts.add(device)
        self.sweep()
        self._settle()
        limit = self.limits.get(device)
        if limit is not None and self.used[device] + nbytes > limit:
            raise torch.OutOfMemoryError(
                f"pretend out of memory: tried to allocate {nbytes:,} bytes on device {device}, which has {limit:,} "
                f"and uses {self.used[device]:,}"
            )
        free = self._free[stream, nbytes]
        if free:
            return free.pop()
        if device not in self._next:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            self._next[device] = _libc.mmap(None, _RANGE_BYTES, 0, flags, -1, 0)
        address = self._next[device]
        self._next[device] += math.ceil(nbytes / mmap.PAGESIZE) * mmap.PAGESIZE
        block = self._blocks[address] = Block(device, address, nbytes)
        block.stream = stream
        return block

    def _deleted(self, block: Block) -> None:
        self.used[block.device] -= block.nbytes
        users, block.users = block.users - {block.stream}, set()
        if users:
            self._waiting.append(([user.record_event() for user in users], block))
        else:
            self._reuse(block)

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for events, block in waiting:
            if all(event.query() for event in events):
                self._reuse(block)
            else:
                self._waiting.append((events, block))

    def _reuse(self, block: Block) -> None:
        if machine.schedule.reuse:
            machine.launch(block.stream, lambda: block.data.fill_(_POISON), early=False)
        self._free[block.stream, block.nbytes].append(block)


memory = Memory()
machine.before_launch = memory.sweep


def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: int) -> torch.Tensor:
    """Return a tensor on a device; its contents are NaN."""
    storage = memory.tensor(extent(size, stride) * dtype.itemsize, device)
    if dtype is not torch.uint8:
        storage = storage.view(dtype)
    return as_strided(storage, size, stride, 0)


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last."""
    return 0 if 0 in size else sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1


def as_strided(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """Return a view, by the kernel of host tensors: it changes nothing but sizes."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    found: torch.Tensor = torch.ops.aten.as_strided.default.redispatch(keys, tensor, size, stride, offset)
    return found


def block_of(tensor: torch.Tensor) -> Block:
    """Return the memory of a tensor on the device."""
    return memory.block(tensor.untyped_storage().data_ptr())


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory with the same elements; only the device's work may use it."""
    made = torch.empty(0, dtype=tensor.dtype, device="cpu")
    made.set_(block_of(tensor).data.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    made = made.conj() if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor over the same memory, which does not keep it alive, like a copy of a real device."""
    storage = tensor.untyped_storage()
    raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    made = torch.empty(0, dtype=tensor.dtype, device="cpu")
    flat = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    return made.set_(flat, tensor.storage_offset(), tensor.size(), tensor.stride())


class HostRegistry:
    """Host memory that copies reach without the processor: `cudaHostRegister` and its like."""

    class cudaError:  # noqa: N801 - the name of CUDA
        success = 0

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self._copies: list[tuple[int, int, Any]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        """Pin memory, with a context on the current device."""
        del flags
        machine.contexts.add(machine.local.device)
        with machine.changed:
            self.ranges[address] = nbytes
        return self.cudaError.success

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Unpin memory."""
        machine.contexts.add(machine.local.device)
        with machine.changed:
            nbytes = self.ranges.pop(address)
            copies = [(begin, end, work) for begin, end, work in self._copies if not work.done]
        for begin, end, work in copies:
            if begin < address + nbytes and address < end:
                machine.violations.append("host memory was unpinned while a copy used it")
                machine.complete(work)  # before the memory is gone
        return self.cudaError.success

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a host tensor's memory is pinned."""
        begin = tensor.untyped_storage().data_ptr()
        return any(at <= begin < at + nbytes for at, nbytes in [*self.ranges.items()])

    def note_copy(self, tensor: torch.Tensor, work: Any) -> None:
        """Note that queued work uses host memory."""
        begin = tensor.data_ptr()
        self._copies = [each for each in self._copies if not each[2].done]
        self._copies.append((begin, begin + max(1, tensor.nbytes), work))
