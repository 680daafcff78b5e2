"""Arenas in memory that the storage of a checkpoint lends: what is staged there is saved without a further copy."""

from __future__ import annotations

import threading

import numpy as np

from dcp_async.errors import StagingLimitError
from dcp_async.staging.arena import Arena
from dcp_io import LentMemory, MemoryLender

__all__ = ["LentArena", "LentArenas"]

# A checkpoint that is being removed frees its memory within this time; otherwise the storage takes more.
_LEND_SECONDS = 2.0


class LentArena(Arena):
    """Arena in lent memory, whose size is fixed.

    Args:
        lent: The memory.
        pinned: Whether the buffer is pinned memory, if CUDA is available.
    """

    def __init__(self, lent: LentMemory, *, pinned: bool) -> None:
        super().__init__(shared=False, pinned=pinned)
        self.lent = lent
        self.descriptor = lent.descriptor
        self._memory = np.frombuffer(lent.memory, np.uint8)[: lent.nbytes]
        self.nbytes = lent.nbytes
        if self._pinned:
            self._pin()

    def reserve(self, nbytes: int) -> None:
        """Check that the buffer has at least `nbytes`; it cannot grow."""
        if nbytes > self.nbytes:
            raise StagingLimitError(f"lent memory of {self.nbytes:,} bytes cannot grow to {nbytes:,}")


class LentArenas:
    """Arenas in the memory that lenders have lent; memory that is lent again is the same arena again.

    Args:
        pinned: Whether the arenas are pinned memory, if CUDA is available.
        max_bytes: Limit of the size of one arena in bytes; None for no limit.
    """

    def __init__(self, *, pinned: bool, max_bytes: int | None) -> None:
        self._pinned, self._max_bytes = pinned, max_bytes
        self._known: list[LentArena] = []
        self._taken: dict[LentArena, MemoryLender] = {}
        self._closed = False
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Size in bytes of the arenas that are in use."""
        with self._lock:
            return sum(arena.nbytes for arena in self._taken)

    def take(self, nbytes: int, lender: MemoryLender) -> LentArena:
        """Borrow an arena of at least `nbytes` bytes, until `give_back`.

        Raises:
            StagingLimitError: The arena would be larger than `max_bytes`.
            OSError: The lender has no memory.
        """
        if self._max_bytes is not None and nbytes > self._max_bytes:
            raise StagingLimitError(
                f"{nbytes:,} bytes are to be staged in memory that the checkpoint's storage keeps, so nothing can be "
                f"copied in waves, and max_staging_bytes={self._max_bytes:,} allows less. Raise it, or save to another "
                "storage"
            )
        lent = lender.lend(max(1, nbytes), seconds=_LEND_SECONDS)
        with self._lock:
            for freed in [arena for arena in self._known if arena.lent.closed]:
                self._known.remove(freed)
                freed.close()
            arena = next((one for one in self._known if one.lent is lent), None)
            if arena is None:
                arena = LentArena(lent, pinned=self._pinned)
                self._known.append(arena)
            self._taken[arena] = lender
        return arena

    def give_back(self, arena: LentArena) -> None:
        """End the loan of an arena, and have the lender make the next one ready, in a thread."""
        with self._lock:
            lender, closed = self._taken.pop(arena, None), self._closed
        if lender is None:
            return
        arena.lent.give_back()
        if closed:
            arena.close()
            return
        # Not by this thread, on which the end of the save waits.
        threading.Thread(target=lender.prepare, args=(arena.nbytes,), name="dcp-lend", daemon=True).start()

    def close(self) -> None:
        """Release the arenas that are not in use; those in use are released when they are given back."""
        with self._lock:
            self._closed = True
            idle = [arena for arena in self._known if arena not in self._taken]
            self._known.clear()
        for arena in idle:
            arena.close()
