"""`Arenas`: segments that are lent to savers. Bytes staged there become objects without a copy.

An arena is free if it is neither lent nor reserved, no object or sink refers to it, and no process of a dead borrower
can still use it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dcp_memory.keeper.pool import Pool, Segment, full_text

_SMALL_BYTES = 16 << 20
_COARSE = 1 << 20
_FINE = 64 << 10
# So many loans of a process count: it may save states of two sizes in turn.
_RECENT = 2


@dataclass(eq=False, slots=True)
class Borrower:
    """A connection that borrows arenas."""

    number: int
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))
    asking: bool = False
    """Whether it waits for a loan of the last size in `recent`."""
    making: int = 0
    """Bytes that are being allocated for it."""
    failed: str | None = None

    @property
    def most_bytes(self) -> int:
        """Size of the largest recent loan."""
        return max(self.recent, default=0)


@dataclass(eq=False, slots=True)
class Arena:
    """A segment for loans."""

    segment: Segment
    borrower: Borrower | None = None
    lent: bool = False
    users: int = 0
    left: set[int] = field(default_factory=set)
    """Lost connections whose processes may still use it."""
    known: set[int] = field(default_factory=set)
    free_since: float = field(default_factory=time.monotonic)


class Arenas:
    """Arenas of a keeper."""

    def __init__(self, pool: Pool, generations: int) -> None:
        self._pool = pool
        self._generations = generations
        self._arenas: dict[int, Arena] = {}
        self._borrowers: set[Borrower] = set()
        pool.reclaim_with(self._destroy_one)

    @property
    def nbytes(self) -> int:
        """Bytes, including arenas that are being allocated."""
        making = sum(borrower.making for borrower in self._borrowers)
        return making + sum(arena.segment.nbytes for arena in self._arenas.values())

    def all(self) -> Iterable[Arena]:
        """Return all arenas."""
        return self._arenas.values()

    def get(self, inode: int) -> Arena | None:
        """Return an inode's arena, or None."""
        return self._arenas.get(inode)

    def is_free(self, arena: Arena) -> bool:
        """Return whether it may be lent or destroyed."""
        if arena.borrower is not None or arena.users:
            return False
        arena.left = {number for number in arena.left if arena.segment.is_open_for(number)}
        return not arena.left

    def lend(self, borrower: Borrower, nbytes: int, *, force: bool) -> Arena | None:
        """Lend an arena; None means try again. `force` ignores the allowance. Raises MemoryError."""
        self._borrowers.add(borrower)
        if not borrower.recent or borrower.recent[-1] != nbytes or not borrower.asking:
            borrower.recent.append(nbytes)
        borrower.asking = True
        arena = self._reserve(borrower, nbytes, force=force, urgent=True)
        if arena is not None:
            arena.lent, borrower.asking = True, False
            self._keep_to_allowance(0)
        return arena

    def prepare(self, borrower: Borrower, nbytes: int) -> Arena | None:
        """Reserve an arena for the next loan, within the allowance; raise as `lend` does."""
        self._borrowers.add(borrower)
        if not borrower.recent:
            borrower.recent.append(nbytes)
        return self._reserve(borrower, nbytes, force=False, urgent=False)

    def give_back(self, arena: Arena) -> None:
        """End a loan or a reservation."""
        arena.borrower, arena.lent = None, False
        arena.free_since = time.monotonic()

    def use(self, arena: Arena) -> None:
        """Count a reference of an object or sink."""
        arena.users += 1

    def release(self, arena: Arena) -> None:
        """Drop such a reference."""
        arena.users -= 1
        arena.free_since = time.monotonic()

    def lose(self, borrower: Borrower) -> None:
        """End a lost connection's loans; other processes may still use the memory."""
        self._borrowers.discard(borrower)
        for arena in self._arenas.values():
            arena.known.discard(borrower.number)
            if arena.borrower is borrower:
                if arena.lent:
                    arena.left.add(borrower.number)
                self.give_back(arena)

    def trim(self, seconds: float) -> None:
        """Destroy arenas that have been free for `seconds`, if no connection has borrowed any."""
        if self._borrowers:
            return
        before = time.monotonic() - seconds
        for arena in [*self._arenas.values()]:
            if arena.free_since <= before and self.is_free(arena):
                self._destroy(arena)

    def _reserve(self, borrower: Borrower, nbytes: int, *, force: bool, urgent: bool) -> Arena | None:
        own = [arena for arena in self._arenas.values() if arena.borrower is borrower and not arena.lent]
        free = [arena for arena in self._arenas.values() if self.is_free(arena)]
        arena = _best(own, nbytes, borrower) or _best(free, nbytes, borrower)
        if arena is None:
            failed, borrower.failed = borrower.failed, None
            if failed is not None:
                raise MemoryError(failed)
            if not borrower.making:
                self._grow(borrower, nbytes, force=force, urgent=urgent)
            if not borrower.making:  # rather one that is far too large than none
                arena = _best(free, nbytes, borrower, most_bytes=None)
        for other in own:
            if other is not arena:
                self.give_back(other)
        if arena is not None:
            arena.borrower = borrower
        return arena

    def _grow(self, borrower: Borrower, nbytes: int, *, force: bool, urgent: bool) -> None:
        size = _rounded(nbytes)
        within = self._keep_to_allowance(size)
        if not within and not force:
            return
        try:
            self._pool.make(size, lambda made: self._made(borrower, size, made), zeroed=True)
        except MemoryError:
            if force or not urgent:
                raise
        else:
            borrower.making = size

    def _keep_to_allowance(self, size: int) -> bool:
        allowance = (self._generations + 1) * sum(_rounded(each.most_bytes) for each in self._borrowers)
        for arena in self._useless():
            if self.nbytes + size <= allowance:
                break
            self._destroy(arena)
        return self.nbytes + size <= allowance

    def _useless(self) -> list[Arena]:
        wanted = [nbytes for each in self._borrowers for nbytes in each.recent]
        useless = (
            arena
            for arena in [*self._arenas.values()]
            if self.is_free(arena) and not any(_fits(arena, nbytes, _most_bytes(nbytes)) for nbytes in wanted)
        )
        return sorted(useless, key=lambda arena: arena.segment.nbytes)

    def _made(self, borrower: Borrower, size: int, made: Segment | OSError) -> None:
        borrower.making = 0
        if isinstance(made, OSError):
            borrower.failed = full_text(made, size)
            return
        self._arenas[made.inode] = Arena(made, borrower if borrower in self._borrowers else None)

    def _destroy_one(self) -> bool:
        free = [arena for arena in self._arenas.values() if self.is_free(arena)]
        if not free:
            return False
        self._destroy(min(free, key=lambda arena: arena.segment.nbytes))
        return True

    def _destroy(self, arena: Arena) -> None:
        del self._arenas[arena.segment.inode]
        self._pool.destroy(arena.segment)


def _rounded(nbytes: int) -> int:
    unit = _COARSE if nbytes > _SMALL_BYTES else _FINE
    return -(-nbytes // unit) * unit


def _most_bytes(nbytes: int) -> int:
    return 2 * nbytes + _COARSE


def _fits(arena: Arena, nbytes: int, most_bytes: int | None) -> bool:
    size = arena.segment.nbytes
    return size >= nbytes and (most_bytes is None or size <= most_bytes)


_OF_SIZE = -1


def _best(arenas: Iterable[Arena], nbytes: int, borrower: Borrower, most_bytes: int | None = _OF_SIZE) -> Arena | None:
    """Return the smallest arena that fits (`most_bytes` None: any), preferably one that is mapped already."""
    most = _most_bytes(nbytes) if most_bytes == _OF_SIZE else most_bytes
    fitting = [arena for arena in arenas if _fits(arena, nbytes, most)]
    return min(
        fitting,
        key=lambda arena: (arena.segment.nbytes, borrower.number not in arena.known, len(arena.known)),
        default=None,
    )
