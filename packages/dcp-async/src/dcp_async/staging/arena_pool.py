"""`ArenaPool`: a saver's arenas, those of its own and those that storages lend."""

from __future__ import annotations

import threading

from dcp_async.errors import StagingLimitError
from dcp_async.staging.arena import Arena, whole_pages
from dcp_async.staging.lent_arenas import LentArena, LentArenas
from dcp_io import MemoryLender

__all__ = ["ArenaPool"]


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
        self._lent = LentArenas(pinned=pinned, max_bytes=max_bytes)
        self._free: list[Arena] = []
        self._taken: list[Arena] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Size of all arenas together, in bytes."""
        with self._lock:
            return self._lent.nbytes + sum(arena.nbytes for arena in (*self._free, *self._taken))

    def take(self, nbytes: int, lender: MemoryLender | None = None) -> Arena:
        """Return an unused arena of at least `nbytes` bytes, which must be returned with `give_back`.

        Args:
            nbytes: Number of bytes, 0 or more.
            lender: Lender of the memory of the storage that is saved to; None for memory of the pool's own.

        Raises:
            StagingLimitError: All arenas together would exceed `max_bytes`; the message has the sizes.
            OSError: The lender has no memory.
        """
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
