"""`Catalogue`: a keeper's objects by folder and name."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dcp_memory.keeper.arenas import Arena, Arenas
from dcp_memory.keeper.pool import Pool
from dcp_memory.keeper.slabs import SlabRange, Slabs

# What an object costs besides its bytes.
_OBJECT_BYTES = 512


@dataclass(eq=False, slots=True)
class StoredObject:
    """Bytes under a name."""

    size: int
    mtime: float
    blob: bytes | None
    extents: bytes = b""
    """Records of `wire.EXTENT`, in order."""
    ranges: tuple[SlabRange, ...] = ()
    arenas: tuple[Arena, ...] = ()
    holders: int = 1
    """References: its name, and one for each opening."""
    left: set[int] = field(default_factory=set)
    """Lost connections whose processes may still read it."""


@dataclass(eq=False, slots=True)
class Reservation:
    """An object that is being written."""

    key: str | None
    """None if the object will replace another one."""
    number: int
    ranges: list[SlabRange] = field(default_factory=list)
    arenas: list[Arena] = field(default_factory=list)


class Catalogue:
    """A keeper's objects. Keys are paths, `folder/name`, or names in the top folder."""

    def __init__(self, pool: Pool, slabs: Slabs, arenas: Arenas) -> None:
        self._pool, self._slabs, self._arenas = pool, slabs, arenas
        self._folders: dict[str, dict[str, StoredObject]] = {}
        self._reserved: dict[str, Reservation] = {}

    def find(self, key: str) -> StoredObject | None:
        """Return a key's object, or None."""
        folder, name = split_key(key)
        return self._folders.get(folder, {}).get(name)

    def listing(self, folder: str) -> list[tuple[str, int, float]]:
        """Return names, sizes and times of a folder's objects."""
        return [(name, each.size, each.mtime) for name, each in self._folders.get(folder, {}).items()]

    def folders(self, folder: str) -> list[str]:
        """Return the subfolders that have objects, sorted."""
        start = f"{folder}/" if folder else ""
        found = {each[len(start) :].partition("/")[0] for each in self._folders if each.startswith(start)}
        return sorted(found - {""})

    def totals(self) -> tuple[int, int]:
        """Return the numbers of objects and bytes."""
        sizes = [each.size for names in self._folders.values() for each in names.values()]
        return len(sizes), sum(sizes)

    def reserve(self, key: str | None, number: int) -> Reservation | None:
        """Begin an object; None if the name is taken."""
        if key is not None and (key in self._reserved or self.find(key) is not None):
            return None
        made = Reservation(key, number)
        if key is not None:
            self._reserved[key] = made
        return made

    def publish(self, key: str, blob: bytes) -> None:
        """Create or replace a small object; raise MemoryError."""
        made = StoredObject(len(blob), time.time(), blob)
        self._pool.reserve(_cost(made))
        self._put(key, made)

    def commit_blob(self, reservation: Reservation, blob: bytes) -> None:
        """Complete a small object; raise MemoryError."""
        made = StoredObject(len(blob), time.time(), blob)
        self._pool.reserve(_cost(made))
        key = self._leave(reservation)
        self.drop(reservation)
        if key is None:  # its name was deleted, or given to another object
            self._free(made)
        else:
            self._put(key, made)

    def commit(self, reservation: Reservation, size: int, extents: bytes, left: int, key: str | None) -> None:
        """Complete an object in segments; raise MemoryError."""
        made = StoredObject(size, time.time(), None, extents)
        self._pool.reserve(_cost(made))
        if left:
            last = reservation.ranges.pop()
            if left < last.nbytes:
                reservation.ranges.append(SlabRange(last.inode, last.offset, last.nbytes - left))
            self._slabs.give_back(SlabRange(last.inode, last.offset + last.nbytes - left, left))
        reserved = self._leave(reservation)
        made.ranges, made.arenas = tuple(reservation.ranges), tuple(reservation.arenas)
        reservation.ranges, reservation.arenas = [], []
        place = reserved if key is None else key
        if place is None:
            self._free(made)
        else:
            self._put(place, made)

    def drop(self, reservation: Reservation, *, lost: bool = False) -> None:
        """End an incomplete object. The process of a `lost` connection may still write to its memory."""
        self._leave(reservation)
        for piece in reservation.ranges:
            if lost:
                self._slabs.leave(piece, {reservation.number})
            else:
                self._slabs.give_back(piece)
        for arena in reservation.arenas:
            self._arenas.release(arena)
        reservation.ranges, reservation.arenas = [], []

    def delete(self, key: str) -> None:
        """Remove an object, if it exists, even while it is written."""
        self._reserved.pop(key, None)
        folder, name = split_key(key)
        names = self._folders.get(folder, {})
        removed = names.pop(name, None)
        if not names:
            self._folders.pop(folder, None)
        if removed is not None:
            self.release(removed)

    def release(self, stored: StoredObject) -> None:
        """Drop a reference. The last one frees the memory."""
        stored.holders -= 1
        if not stored.holders:
            self._free(stored)

    def leave(self, stored: StoredObject, number: int) -> None:
        """Drop a closed connection's reference, but keep memory that its process may still read."""
        for arena in stored.arenas:
            arena.left.add(number)
        stored.left = self._slabs.readers(stored.ranges, {*stored.left, number})
        self.release(stored)

    def _leave(self, reservation: Reservation) -> str | None:
        key = reservation.key
        if key is None or self._reserved.get(key) is not reservation:
            return None
        del self._reserved[key]
        return key

    def _put(self, key: str, made: StoredObject) -> None:
        self._reserved.pop(key, None)
        folder, name = split_key(key)
        names = self._folders.setdefault(folder, {})
        old = names.pop(name, None)
        names[name] = made
        if old is not None:
            self.release(old)

    def _free(self, stored: StoredObject) -> None:
        self._pool.release(_cost(stored))
        for piece in stored.ranges:
            self._slabs.leave(piece, stored.left)
        for arena in stored.arenas:
            self._arenas.release(arena)


def _cost(stored: StoredObject) -> int:
    return _OBJECT_BYTES + len(stored.extents) + (0 if stored.blob is None else len(stored.blob))


def split_key(key: str) -> tuple[str, str]:
    """Return folder and name."""
    folder, _, name = key.rpartition("/")
    return folder, name
