"""`Arena`: shared memory of one rank, which other ranks of the host read without a copy.

Source: Linux `memfd_create(2)`, `mmap(2)`.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence

from dcp_exchange.errors import ExchangeError


class Arena:
    """Slots of shared memory, each with a count of users. Not thread-safe: callers hold a lock.

    The memory has no name: the kernel frees it with its last descriptor.
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

    def has_free(self, purpose: int = 0) -> bool:
        """Return whether `take` would find a slot."""
        return bool(self._free[purpose])

    def take(self, purpose: int = 0) -> int:
        """Take a free slot, with one user. Call `has_free` first."""
        slot: int = self._free[purpose].pop()
        self._users[slot] = 1
        return slot

    def share(self, slot: int, users: int) -> None:
        """Add users to a taken slot."""
        self._users[slot] += users

    def release(self, slot: int) -> bool:
        """Remove one user; return whether the slot is free now."""
        self._users[slot] -= 1
        if self._users[slot]:
            return False
        del self._users[slot]
        self._free[self._purposes[slot]].append(slot)
        return True

    @property
    def taken(self) -> int:
        """Number of taken slots."""
        return len(self._users)

    def view(self, slot: int, size: int) -> memoryview:
        """Return the first `size` bytes, writable."""
        start = slot * self.slot_bytes
        return self._memory[start : start + size]

    def close(self) -> None:
        """Close the descriptor. The kernel frees the memory after the last user."""
        os.close(self.descriptor)
        self._memory = memoryview(b"")


class Window:
    """View of another rank's arena, for reading only; it is mapped writable because torch refuses read-only memory."""

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
    try:
        yield
    except OSError as error:
        raise ExchangeError(
            f"no shared memory of {size:,} bytes for a cooperative load ({error}): allow more memory, larger files or "
            "more open files (ulimit -v, -f, -n), or load with cooperative=False"
        ) from error
