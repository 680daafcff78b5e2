"""Arenas: reusable memory for staged tensors, which a worker process can map, or which a storage lends.

Source: Linux `memfd_create(2)`: a memory file without a name, freed when the last process that uses it ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from dcp_core.errors import NotEnoughMemoryError
from dcp_core.tensors.devices import pin
from dcp_io import LentMemory, MemoryLender

_PAGE_BYTES = mmap.PAGESIZE


class Arena:
    """A reusable buffer for the staged tensors of one save at a time.

    With `shared`, it is a memory file, which another process can map by its `descriptor`.
    """

    def __init__(self, *, shared: bool, pinned: bool) -> None:
        self.descriptor = os.memfd_create("dcp-staging") if shared else -1
        self.nbytes = 0
        self.grown = 0
        self.closed = False
        self._pinned = pinned and torch.accelerator.is_available()
        self._memory: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._unpin: Callable[[], object] | None = None
        self._user: weakref.ref[npt.NDArray[np.uint8]] | None = None
        self._close = weakref.finalize(self, os.close, self.descriptor) if shared else None
        if self._close is not None:
            _shared.add(self)

    @property
    def address(self) -> int:
        """Address in this process."""
        return self._memory.ctypes.data

    def in_use(self) -> bool:
        """Return whether a view of the buffer is still referenced."""
        return self._user is not None and self._user() is not None

    def reserve(self, nbytes: int) -> None:
        """Grow to at least `nbytes`; growing loses the contents."""
        if nbytes > self.nbytes:
            self._release()
            size = whole_pages(nbytes)
            if self.descriptor >= 0:
                os.ftruncate(self.descriptor, size)
            mapped = mmap.mmap(self.descriptor, size)
            # The trainer's forked children (data loaders) must not keep the memory after the trainer ends.
            mapped.madvise(mmap.MADV_DONTFORK)
            self._memory = np.frombuffer(mapped, np.uint8)
            self.nbytes = size
            self.grown += 1
        if self._pinned:
            self._pin()  # the accelerator may be in use only now

    def view(self) -> torch.Tensor:
        """Return the whole buffer as uint8; it is in use until the last view is deleted."""
        own = self._memory[:]
        self._user = weakref.ref(own)
        return torch.from_numpy(own)

    def close(self) -> None:
        """Release the memory once no view of it is referenced."""
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
        if self._unpin is None:
            self._unpin = pin(self._memory, self.address, self.nbytes)


_shared: weakref.WeakSet[Arena] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close memory files in a forked child, where their memory would outlive the trainer.

    A mapping closes its own descriptor later, so a harmless one replaces it.
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
    """Round up to whole memory pages, at least one."""
    return max(1, -(-nbytes // _PAGE_BYTES)) * _PAGE_BYTES


# A checkpoint that is being removed frees its memory within this time; otherwise the storage takes more.
_LEND_TIMEOUT_SECONDS = 2.0


class LentArena(Arena):
    """Arena in lent memory, with a fixed size."""

    def __init__(self, lent: LentMemory, *, pinned: bool) -> None:
        super().__init__(shared=False, pinned=pinned)
        self.lent = lent
        self.descriptor = lent.descriptor
        self._memory = np.frombuffer(lent.memory, np.uint8)[: lent.nbytes]
        self.nbytes = lent.nbytes

    def reserve(self, nbytes: int) -> None:
        """Raise NotEnoughMemoryError if `nbytes` do not fit."""
        if nbytes > self.nbytes:
            raise NotEnoughMemoryError(f"lent memory of {self.nbytes:,} bytes cannot grow to {nbytes:,}")
        if self._pinned:
            self._pin()


class LentArenas:
    """Arenas in lent memory, each of at most `max_bytes`; memory that is lent again gives the same arena."""

    def __init__(self, *, pinned: bool, max_bytes: int | None) -> None:
        self._pinned, self._max_bytes = pinned, max_bytes
        self._known: list[LentArena] = []
        self._taken: dict[LentArena, MemoryLender] = {}
        self._closed = False
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the arenas that are in use."""
        with self._lock:
            return sum(arena.nbytes for arena in self._taken)

    def take(self, nbytes: int, lender: MemoryLender) -> LentArena:
        """Borrow an arena of at least `nbytes`.

        Raises NotEnoughMemoryError, or OSError if the lender's memory is full.
        """
        if self._max_bytes is not None and nbytes > self._max_bytes:
            raise NotEnoughMemoryError(
                f"{nbytes:,} bytes are to be staged in memory that the checkpoint's storage keeps, so nothing can be "
                f"copied in waves, and max_staging_bytes={self._max_bytes:,} allows less. Raise it, or save to another "
                "storage"
            )
        lent = lender.lend(max(1, nbytes), timeout_seconds=_LEND_TIMEOUT_SECONDS)
        with self._lock:
            for freed in [arena for arena in self._known if arena.lent.closed]:
                self._known.remove(freed)
                freed.close()
            arena = next((one for one in self._known if one.lent is lent), None)
            if arena is None:
                arena = LentArena(lent, pinned=self._pinned)
                self._known.append(arena)
            self._taken[arena] = lender
        arena.reserve(nbytes)
        return arena

    def give_back(self, arena: LentArena) -> None:
        """End a loan; a thread has the lender prepare the next one."""
        with self._lock:
            lender, closed = self._taken.pop(arena, None), self._closed
        if lender is None:
            return
        arena.lent.give_back()
        if closed:
            arena.close()
            return
        # The end of the save waits for this thread.
        threading.Thread(target=lender.prepare, args=(arena.nbytes,), name="dcp-lend", daemon=True).start()

    def close(self) -> None:
        """Release idle arenas now, and the others when given back."""
        with self._lock:
            self._closed = True
            idle = [arena for arena in self._known if arena not in self._taken]
            self._known.clear()
        for arena in idle:
            arena.close()


class ArenaPool:
    """A saver's arenas, with at most `max_bytes` together.

    With `until_dropped`, a returned arena stays in use until the last tensor in it is deleted.
    """

    def __init__(
        self, *, shared: bool, pinned: bool, max_bytes: int | None = None, until_dropped: bool = False
    ) -> None:
        self._until_dropped = until_dropped
        self._shared, self._pinned, self._max_bytes = shared, pinned, max_bytes
        self._lent = LentArenas(pinned=pinned, max_bytes=max_bytes)
        self._free: list[Arena] = []
        self._taken: list[Arena] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        with self._lock:
            return self._lent.nbytes + sum(arena.nbytes for arena in (*self._free, *self._taken))

    def take(self, nbytes: int, lender: MemoryLender | None = None) -> Arena:
        """Return an unused arena of at least `nbytes`, from the `lender` if given; raise as `LentArenas.take` does."""
        if lender is not None:
            return self._lent.take(nbytes, lender)
        with self._lock:
            idle = sorted(
                (arena for arena in self._free if not (self._until_dropped and arena.in_use())),
                key=lambda arena: arena.nbytes,
            )
            fitting = [arena for arena in idle if arena.nbytes >= nbytes]
            arena = fitting[0] if fitting else idle[-1] if idle else Arena(shared=self._shared, pinned=self._pinned)
            others = self._make_room(max(whole_pages(nbytes), arena.nbytes), arena, idle)
            if others is not None:
                raise NotEnoughMemoryError(
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
        """Take an arena back; the next `take` may overwrite it."""
        if isinstance(arena, LentArena):
            self._lent.give_back(arena)
            return
        with self._lock:
            if arena in self._taken:
                self._taken.remove(arena)
                self._free.append(arena)

    def close(self) -> None:
        """Release the memory of all arenas."""
        self._lent.close()
        with self._lock:
            for arena in (*self._free, *self._taken):
                arena.close()
            self._free.clear()
            self._taken.clear()
