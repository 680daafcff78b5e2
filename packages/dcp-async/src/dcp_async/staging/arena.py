"""Arenas: reusable memory buffers for staged tensors, which can be shared with a worker process.

The layout of tensors in an arena and the copying are in `placement` and `copying`.

Source: Linux `memfd_create(2)`: a memory file without a name, which the kernel frees when the last process that uses it
ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dcp_async.errors import StagingLimitError

__all__ = ["Arena", "ArenaPool"]

_PAGE_BYTES = mmap.PAGESIZE
_CUDA_HOST_REGISTER_PORTABLE = 1


class Arena:
    """A reusable memory buffer that holds the staged tensors of one save at a time.

    Args:
        shared: Whether the buffer is a memory file, which another process can map by its file descriptor `descriptor`.
        pinned: Whether the buffer is pinned memory, if CUDA is available.
    """

    def __init__(self, *, shared: bool, pinned: bool) -> None:
        self.descriptor = os.memfd_create("dcp-staging") if shared else -1
        self.nbytes = 0
        self.grown = 0
        """Number of allocations of the buffer so far."""
        self.closed = False
        """Whether `close` was called."""
        self._pinned = pinned and torch.cuda.is_available()
        self._memory: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._unpin: Callable[[], object] | None = None
        self._user: weakref.ref[npt.NDArray[np.uint8]] | None = None
        self._close = weakref.finalize(self, os.close, self.descriptor) if shared else None
        if self._close is not None:
            _shared.add(self)

    @property
    def address(self) -> int:
        """Memory address of the buffer in this process."""
        return self._memory.ctypes.data

    def in_use(self) -> bool:
        """Return whether a tensor that is a view of the buffer is still referenced."""
        return self._user is not None and self._user() is not None

    def reserve(self, nbytes: int) -> None:
        """Grow the buffer to at least `nbytes`. Its contents are lost if it must grow."""
        if nbytes <= self.nbytes:
            return
        self._release()
        size = _whole_pages(nbytes)
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, size)
        mapped = mmap.mmap(self.descriptor, size)
        # Children that the trainer forks (for loading data) must not keep the memory when it ends.
        mapped.madvise(mmap.MADV_DONTFORK)
        self._memory = np.frombuffer(mapped, np.uint8)
        self.nbytes = size
        self.grown += 1
        if self._pinned:
            self._pin()

    def view(self) -> torch.Tensor:
        """Return the whole buffer as a uint8 tensor; the buffer is in use until the last view of it is deleted."""
        own = self._memory[:]
        self._user = weakref.ref(own)
        return torch.from_numpy(own)

    def close(self) -> None:
        """Release the memory of the buffer as soon as no view of it is referenced."""
        self.closed = True
        self._release()
        if self._close is not None:
            self._close()

    def _release(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._memory = np.zeros(0, np.uint8)
        self.nbytes = 0

    def _pin(self) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self.address
        if runtime.cudaHostRegister(address, self.nbytes, _CUDA_HOST_REGISTER_PORTABLE) == runtime.cudaError.success:
            self._unpin = weakref.finalize(self._memory, runtime.cudaHostUnregister, address)


class ArenaPool:
    """Pool of a saver's arenas: one for each save whose copy is in use, and idle arenas for later saves.

    Args:
        shared: Whether the arenas are memory files, which another process can map.
        pinned: Whether the arenas are pinned memory, if CUDA is available.
        max_bytes: Limit in bytes of the memory of all arenas together; None for no limit.
        until_dropped: Whether a returned arena stays in use until the last tensor in it is deleted.
    """

    def __init__(
        self, *, shared: bool, pinned: bool, max_bytes: int | None = None, until_dropped: bool = False
    ) -> None:
        self._until_dropped = until_dropped
        self._shared, self._pinned, self._max_bytes = shared, pinned, max_bytes
        self._free: list[Arena] = []
        self._taken: list[Arena] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Size of all arenas together, in bytes."""
        with self._lock:
            return sum(arena.nbytes for arena in (*self._free, *self._taken))

    def take(self, nbytes: int) -> Arena:
        """Return an unused arena of at least `nbytes` bytes, which must be returned with `give_back`.

        Raises:
            StagingLimitError: All arenas together would exceed `max_bytes`; the message has the sizes.
        """
        with self._lock:
            idle = sorted(
                (arena for arena in self._free if not (self._until_dropped and arena.in_use())),
                key=lambda arena: arena.nbytes,
            )
            fitting = [arena for arena in idle if arena.nbytes >= nbytes]
            arena = fitting[0] if fitting else idle[-1] if idle else Arena(shared=self._shared, pinned=self._pinned)
            others = self._make_room(max(_whole_pages(nbytes), arena.nbytes), arena, idle)
            if others is not None:
                raise StagingLimitError(
                    f"{nbytes:,} bytes are to be staged, and copies that are still read take {others:,}; "
                    f"max_staging_bytes={self._max_bytes:,} allows less. Raise it, save fewer bytes at a time, wait "
                    "for earlier saves (overlap='wait'), or let training wait until the storage has taken what does "
                    "not fit (staging='waves', with the saver's own stager and a DefaultSavePlanner)"
                )
            arena.reserve(nbytes)
            if arena in self._free:
                self._free.remove(arena)
            self._taken.append(arena)
            return arena

    def _make_room(self, nbytes: int, arena: Arena, idle: list[Arena]) -> int | None:
        """Drop idle arenas until `arena` may grow to the given size; otherwise return the bytes of those in use."""
        droppable = [each for each in idle if each is not arena]
        others = sum(each.nbytes for each in (*self._free, *self._taken) if each is not arena)
        limit = others + nbytes if self._max_bytes is None else self._max_bytes
        in_use = others - sum(each.nbytes for each in droppable)
        if in_use + nbytes > limit:
            return in_use
        for each in droppable:
            if others + nbytes <= limit:
                break
            others -= each.nbytes
            self._free.remove(each)
            each.close()
        return None

    def give_back(self, arena: Arena) -> None:
        """Give an arena back to the pool after its save; the next `take` may return the arena, and overwrite it."""
        with self._lock:
            if arena in self._taken:
                self._taken.remove(arena)
                self._free.append(arena)

    def close(self) -> None:
        """Release the memory of all arenas."""
        with self._lock:
            for arena in (*self._free, *self._taken):
                arena.close()
            self._free.clear()
            self._taken.clear()


_shared: weakref.WeakSet[Arena] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close memory files in a forked child: held open, their memory would outlive the trainer.

    A mapping has its own descriptor, which it closes when it is dropped; this descriptor is replaced by a harmless one.
    """
    open_files = [os.fstat(arena.descriptor) for arena in _shared if arena._close is not None and arena._close.alive]  # noqa: SLF001
    if not open_files:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            if any(os.path.samestat(os.fstat(int(name)), each) for each in open_files):
                os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_close_in_child)


def _whole_pages(nbytes: int) -> int:
    return max(1, -(-nbytes // _PAGE_BYTES)) * _PAGE_BYTES
