"""`Slabs`: segments for bytes that clients copy into the keeper."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dcp_memory.keeper.pool import Pool, Segment, full_text
from dcp_memory.wire import PAGE_BYTES

_LEAST_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
# A new slab has this part of the bytes that slabs have already: few slabs, and little that is not in use.
_PART = 8


@dataclass(frozen=True, slots=True)
class SlabRange:
    """Pages of a slab that belong to an object or sink."""

    inode: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class _Slab:
    segment: Segment
    free: list[tuple[int, int]]
    """Free ranges (start, end), ascending; no two touch."""
    left: list[tuple[set[int], SlabRange]] = field(default_factory=list)
    """Ranges of lost connections, with their numbers: free once no process can use them."""
    used: int = 0
    free_since: float = 0.0


class Slabs:
    """Slabs of a keeper."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._slabs: dict[int, _Slab] = {}
        self._making = 0
        self._failed: str | None = None
        pool.reclaim_with(self._destroy_one)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.segment.nbytes for slab in self._slabs.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of objects and sinks."""
        return sum(slab.used for slab in self._slabs.values())

    def __contains__(self, inode: int) -> bool:
        return inode in self._slabs

    def take(self, nbytes: int) -> SlabRange | None:
        """Take at most `nbytes`, rounded to pages; None means try again. Raises MemoryError."""
        nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        found = self._find(nbytes)
        if found is None and any(slab.left for slab in self._slabs.values()):
            self._settle()
            found = self._find(nbytes)
        if found is not None:
            return found
        try:
            self._grow_for(nbytes)
        except MemoryError:
            found = self._find(nbytes, PAGE_BYTES)
            if found is None:
                raise
        return found

    def give_back(self, piece: SlabRange) -> None:
        """Free a range."""
        slab = self._slabs[piece.inode]
        start, stop = piece.offset, piece.offset + piece.nbytes
        slab.used -= piece.nbytes
        slab.free.append((start, stop))
        slab.free.sort()
        joined: list[tuple[int, int]] = []
        for begin, end in slab.free:
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((begin, end))
        slab.free[:] = joined
        if not slab.used:
            slab.free_since = time.monotonic()

    def leave(self, piece: SlabRange, numbers: set[int]) -> None:
        """Free a range once no process of these lost connections can use it."""
        if not numbers:
            self.give_back(piece)
            return
        self._slabs[piece.inode].left.append((numbers, piece))
        self._settle()

    def readers(self, pieces: Sequence[SlabRange], numbers: set[int]) -> set[int]:
        """Return lost connections whose processes can still use one of the ranges."""
        segments = {self._slabs[piece.inode].segment for piece in pieces}
        return {number for number in numbers if any(segment.is_open_for(number) for segment in segments)}

    def trim(self, seconds: float) -> None:
        """Destroy slabs that have been free for `seconds`."""
        self._settle()
        before = time.monotonic() - seconds
        for slab in [*self._slabs.values()]:
            if not slab.used and slab.free_since <= before:
                self._destroy(slab)

    def _settle(self) -> None:
        for slab in [*self._slabs.values()]:
            waiting, slab.left = slab.left, []
            for numbers, piece in waiting:
                if open_for := {number for number in numbers if slab.segment.is_open_for(number)}:
                    slab.left.append((open_for, piece))
                else:
                    self.give_back(piece)

    def _find(self, nbytes: int, least_bytes: int = _LEAST_BYTES) -> SlabRange | None:
        best: tuple[int, _Slab, int] | None = None
        for slab in self._slabs.values():
            for at, (start, stop) in enumerate(slab.free):
                size = min(stop - start, nbytes)
                if best is None or size > best[0]:
                    best = size, slab, at
                if size == nbytes:
                    break
            if best is not None and best[0] == nbytes:
                break
        if best is None or best[0] < min(nbytes, least_bytes):
            return None
        size, slab, at = best
        start, stop = slab.free.pop(at)
        if start + size < stop:
            slab.free.insert(at, (start + size, stop))
        slab.used += size
        return SlabRange(slab.segment.inode, start, size)

    def _grow_for(self, nbytes: int) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise MemoryError(failed)
        if not self._making:
            self._grow(nbytes)

    def _grow(self, nbytes: int) -> None:
        size = _LEAST_BYTES
        while size < min(self.nbytes // _PART, _MOST_BYTES) or size < min(nbytes, _MOST_BYTES):
            size *= 2
        while True:
            try:
                self._pool.make(size, self._made, zeroed=False)
            except MemoryError:
                if size == _LEAST_BYTES:
                    raise
                size //= 2
            else:
                self._making = size
                return

    def _made(self, made: Segment | OSError) -> None:
        size, self._making = self._making, 0
        if isinstance(made, OSError):
            self._failed = full_text(made, size)
            return
        self._slabs[made.inode] = _Slab(made, [(0, made.nbytes)], free_since=time.monotonic())

    def _destroy_one(self) -> bool:
        self._settle()
        for slab in self._slabs.values():
            if not slab.used:
                self._destroy(slab)
                return True
        return False

    def _destroy(self, slab: _Slab) -> None:
        del self._slabs[slab.segment.inode]
        self._pool.destroy(slab.segment)
