"""Arenas: reusable memory buffers for staged tensors, which can be shared with a worker process.

The pool of a saver's arenas is in `arena_pool`. How tensors are laid out and copied: see `placement` and `copying`.

Source: Linux `memfd_create(2)`: a memory file without a name, which the kernel frees when the last process that uses it
ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Arena", "whole_pages"]

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
        size = whole_pages(nbytes)
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


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole memory pages, at least one."""
    return max(1, -(-nbytes // _PAGE_BYTES)) * _PAGE_BYTES
