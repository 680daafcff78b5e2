"""Protocols of memory that a store lends to a saver, `LentMemory` and `MemoryLender`; see `Store.lender`."""

from __future__ import annotations

import mmap
from typing import Protocol

__all__ = ["LentMemory", "MemoryLender"]


class LentMemory(Protocol):
    """Protocol of a memory file that a store has lent to this process.

    What a `Sink` of the same store writes from this memory need not be copied: the object refers to it, and keeps it
    after `give_back`. So the bytes must not change once they have been written.
    """

    @property
    def descriptor(self) -> int:
        """File descriptor of the memory file, which this process may pass to another one."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of the memory file in bytes."""
        ...

    @property
    def memory(self) -> mmap.mmap:
        """The memory, mapped in this process and noted with `note_mapping`. Its pages exist already."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the store has freed the memory, after it was given back."""
        ...

    def give_back(self) -> None:
        """End the loan: the store may lend the memory again, unless objects refer to it. Later calls do nothing."""
        ...


class MemoryLender(Protocol):
    """Protocol of what lends the memory of a store to this process. Methods may be called from several threads."""

    def lend(self, nbytes: int, *, seconds: float) -> LentMemory:
        """Lend memory of at least `nbytes` bytes, until `give_back`.

        The same memory is the same object each time that it is lent to this process, so that what was made of it
        (mappings in other processes, pinned pages) can be used again.

        Args:
            nbytes: Number of bytes, at least 1.
            seconds: Longest time to wait until objects that are being removed free memory.

        Raises:
            OSError: The store has no memory for this; the message has the sizes, and what to do.
        """
        ...

    def prepare(self, nbytes: int) -> None:
        """Have memory of this size ready for the next `lend`, as far as the store's budget goes; takes its time.

        Failures are not raised: `lend` meets them again.
        """
        ...
