"""`Arena`: shared memory of one rank, in equal slots, from which other ranks of the host read pieces without a copy.

The memory has no name: a descriptor of it is passed to the other ranks, and the kernel frees it with the last of them.

Source: Linux `memfd_create(2)`, `mmap(2)`.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence

from dcp_exchange.errors import ExchangeError

__all__ = ["Arena", "Window"]


class Arena:
    """Slots of shared memory, with a count of users for each. Not thread-safe: callers hold a lock.

    Args:
        slot_bytes: Size of each slot, bytes.
        slots: Number of slots for each purpose, at least 1 each: a slot is taken for the purpose it is reserved for.

    Raises:
        ExchangeError: There is not enough memory, too many descriptors, or the system has no such memory.
    """

    def __init__(self, slot_bytes: int, slots: Sequence[int]) -> None:
        self.slot_bytes = slot_bytes
        size = slot_bytes * sum(slots)
        with _explained(size):
            self.descriptor = os.memfd_create("dcp-exchange", os.MFD_CLOEXEC)
            try:
                os.ftruncate(self.descriptor, size)
                self._memory = memoryview(mmap.mmap(self.descriptor, size))
            except BaseException:
                os.close(self.descriptor)
                raise
        # The slot that was freed last is taken first: its pages exist, and may be in the processor's cache.
        borders = [*itertools.accumulate(slots, initial=0)]
        self._free = [[*range(start, stop)][::-1] for start, stop in itertools.pairwise(borders)]
        self._purposes = [purpose for purpose, count in enumerate(slots) for _ in range(count)]
        self._users: dict[int, int] = {}

    @property
    def size_bytes(self) -> int:
        """Size of the memory, bytes."""
        return len(self._memory)

    def has_free(self, purpose: int = 0) -> bool:
        """Return whether `take` would find a slot."""
        return bool(self._free[purpose])

    def take(self, purpose: int = 0) -> int:
        """Take a free slot for a purpose, with one user; returns its number. There must be one (see `has_free`)."""
        slot: int = self._free[purpose].pop()
        self._users[slot] = 1
        return slot

    def share(self, slot: int, users: int) -> None:
        """Add users to a slot that is taken."""
        self._users[slot] += users

    def release(self, slot: int) -> bool:
        """Remove one user of a slot; returns whether the slot is free now."""
        self._users[slot] -= 1
        if self._users[slot]:
            return False
        del self._users[slot]
        self._free[self._purposes[slot]].append(slot)
        return True

    @property
    def taken(self) -> int:
        """Number of slots that are taken."""
        return len(self._users)

    def view(self, slot: int, size: int) -> memoryview:
        """Return the first `size` bytes of a slot, writable."""
        start = slot * self.slot_bytes
        return self._memory[start : start + size]

    def close(self) -> None:
        """Close the descriptor; the memory is freed when nobody uses it any more."""
        os.close(self.descriptor)
        self._memory = memoryview(b"")


class Window:
    """View of another rank's arena, for reading alone (torch takes no memory that is marked as such).

    Args:
        descriptor: Descriptor of the arena, which is closed.
        slot_bytes: Size of each slot, bytes.

    Raises:
        ExchangeError: The memory cannot be mapped.
    """

    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        try:
            with _explained(os.fstat(descriptor).st_size):
                self._memory = memoryview(mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)
        self._slot_bytes = slot_bytes

    def view(self, slot: int, size: int) -> memoryview:
        """Return the first `size` bytes of a slot."""
        start = slot * self._slot_bytes
        return self._memory[start : start + size]


@contextlib.contextmanager
def _explained(size: int) -> Iterator[None]:
    """Context manager that adds to an error of the system what the memory is for, and the remedy."""
    try:
        yield
    except OSError as error:
        raise ExchangeError(
            f"no shared memory of {size:,} bytes for a cooperative load ({error}): allow more memory or open files "
            "(ulimit -v, ulimit -n), or load with cooperative=False"
        ) from error
