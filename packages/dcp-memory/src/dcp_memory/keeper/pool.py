"""`Pool`: all memory of a keeper: its segments, its budget, and the thread that allocates and frees them.

All methods are called by the keeper's main thread; only memory is allocated and freed in the other one.
"""

from __future__ import annotations

import errno
import os
import queue
import resource
import threading
from collections import deque
from collections.abc import Callable

from dcp_memory.keeper.segment import Segment, make_segment

__all__ = ["FullError", "Pool"]

MARGIN_BYTES = 32 << 20
"""Memory of the machine, or of a control group, that is left to others."""


_NO_MEMORY = (errno.ENOSPC, errno.ENOMEM)


class FullError(Exception):
    """The budget or the machine has no memory left; the text has the sizes, and what to do."""


class Pool:
    """Memory of a keeper.

    Args:
        max_bytes: Budget: limit of all segments and small objects together.
        available: Returns how many bytes this process may allocate.
        wake: Function that makes the main thread call `collect`.
    """

    def __init__(self, max_bytes: int, available: Callable[[], int], wake: Callable[[], object]) -> None:
        self.max_bytes = max_bytes
        self.total = 0
        """Bytes of segments, also of those that are being allocated, and of small objects."""
        self._making = 0
        self._freeing = 0
        """Bytes of destroyed segments that the thread has yet to free."""
        self.destroyed = 0
        """Number of segments that have been destroyed."""
        self.segments: dict[int, Segment] = {}
        """Inode → segment."""
        self._available = available
        self._wake = wake
        self._reclaimers: list[Callable[[], bool]] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._work, name="dcp-keeper memory")
        self._thread.start()

    def reclaim_with(self, reclaimer: Callable[[], bool]) -> None:
        """Add a function that destroys one segment that is not in use, and returns False if there is none."""
        self._reclaimers.append(reclaimer)

    def reclaim(self) -> bool:
        """Destroy a segment that is not in use; returns False if there is none."""
        return any(reclaim() for reclaim in self._reclaimers)

    def reserve(self, nbytes: int) -> None:
        """Count bytes as used, after making room for them if necessary.

        Raises:
            FullError: The budget or the machine has less; nothing is counted.
        """
        while self.total + nbytes > self.max_bytes:
            if not self.reclaim():
                raise FullError(
                    f"{nbytes:,} bytes more do not fit: the keeper has {self.total:,} in use, and may take "
                    f"{self.max_bytes:,}. Keep fewer checkpoints in it, or start it with a larger --max-bytes "
                    "(DCP_KEEPER_MAX_BYTES)"
                )
        self.total += nbytes

    def release(self, nbytes: int) -> None:
        """Count bytes as free again."""
        self.total -= nbytes

    def make(self, nbytes: int, done: Callable[[Segment | OSError], None], *, zeroed: bool) -> None:
        """Begin to allocate a segment; `collect` calls `done` with it, or with an error.

        Raises:
            FullError: There is no room for it.
        """
        self._make_room(nbytes)

        def job() -> None:
            made: Segment | OSError
            try:
                made = make_segment(nbytes, self._free_bytes, zeroed=zeroed)
            except OSError as error:
                made = error
            except MemoryError:  # the thread must not end: savers would wait for it
                made = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            self._results.append(lambda: finish(made))
            self._wake()

        def finish(made: Segment | OSError) -> None:
            if isinstance(made, OSError) and made.errno in _NO_MEMORY and self.reclaim():
                self._jobs.put(job)  # what the kernel says is free is not exact
                return
            self._making -= 1
            if isinstance(made, Segment):
                self.segments[made.inode] = made
            else:
                self.release(nbytes)
            done(made)

        self._making += 1
        self._jobs.put(job)

    def _make_room(self, nbytes: int) -> None:
        """Count the bytes of another segment, after destroying what is not in use if necessary. Raises FullError."""
        while len(self.segments) + self._making >= (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2):
            if not self.reclaim():
                raise FullError(
                    f"another {nbytes:,} bytes would take more than half of the open files that the keeper may have "
                    f"({limit:,}): raise its `ulimit -n`"
                )
        self.reserve(nbytes)
        # The thread frees what was destroyed before it allocates this.
        while (free := self._free_bytes() + self._freeing) < nbytes:
            if not self.reclaim():
                self.release(nbytes)
                raise FullError(
                    f"{nbytes:,} bytes more do not fit: this machine, or the control group (container) of the keeper, "
                    f"has {free:,} left. Keep fewer checkpoints in it, or give it more memory"
                )

    def destroy(self, segment: Segment) -> None:
        """Free a segment that is not in use. What is allocated from now on may use its memory."""
        del self.segments[segment.inode]
        self.destroyed += 1
        self.release(segment.nbytes)
        self._freeing += segment.nbytes

        def job() -> None:
            segment.free()
            self._results.append(finish)
            self._wake()

        def finish() -> None:
            self._freeing -= segment.nbytes

        self._jobs.put(job)

    def collect(self) -> None:
        """Deliver what has been allocated."""
        while self._results:
            self._results.popleft()()

    def close(self, used: Callable[[Segment], bool]) -> None:
        """End the thread, and free all segments.

        Args:
            used: Whether clients use a segment; its memory is then left to them.
        """
        self._jobs.put(None)
        self._thread.join()
        self.collect()
        for segment in self.segments.values():
            if used(segment):
                segment.close()
            else:
                segment.free()
        self.segments.clear()

    def _free_bytes(self) -> int:
        return self._available() - MARGIN_BYTES

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def full_text(error: OSError, nbytes: int) -> str:
    """Return the text of an error of an allocation."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"the keeper has too many open files for another {nbytes:,} bytes of memory: raise its `ulimit -n`"
    return f"the keeper could not allocate {nbytes:,} bytes: {error.strerror or error}"
