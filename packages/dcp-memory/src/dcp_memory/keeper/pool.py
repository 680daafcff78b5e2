"""`Pool`: a keeper's segments, its budget, and the thread that allocates and frees them.

Call all methods in the keeper's main thread. The keeper allocates the memory files, so that its control group pays
for the pages.

Source: Linux `memfd_create(2)`; `fcntl(2)`, open file description locks. They last as long as the description is open
or mapped in any process, and so tell whether children of a dead client still use its memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
import resource
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator

MARGIN_BYTES = 32 << 20
"""Memory of the machine, or of a control group, that is left to others."""


_NO_MEMORY = (errno.ENOSPC, errno.ENOMEM)


class Pool:
    """`max_bytes` for segments and small objects. `wake` makes the main thread call `collect`."""

    def __init__(self, max_bytes: int, available: Callable[[], int], wake: Callable[[], object]) -> None:
        self.max_bytes = max_bytes
        self.total = 0
        """Bytes of small objects and segments, including those that are being allocated."""
        self._making = 0
        self._freeing = 0
        """Bytes that the thread has yet to free."""
        self.destroyed = 0
        self.segments: dict[int, Segment] = {}
        self._available = available
        self._wake = wake
        self._reclaimers: list[Callable[[], bool]] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._work, name="dcp-keeper memory")
        self._thread.start()

    def reclaim_with(self, reclaimer: Callable[[], bool]) -> None:
        """Add a function that destroys one unused segment, and returns False if there is none."""
        self._reclaimers.append(reclaimer)

    def reclaim(self) -> bool:
        """Destroy an unused segment; return False if there is none."""
        return any(reclaim() for reclaim in self._reclaimers)

    def reserve(self, nbytes: int) -> None:
        """Count bytes as used, after making room; raise MemoryError, and count nothing, if there is none."""
        while self.total + nbytes > self.max_bytes:
            if not self.reclaim():
                raise MemoryError(
                    f"{nbytes:,} bytes more do not fit: the keeper has {self.total:,} in use, and may take "
                    f"{self.max_bytes:,}. Keep fewer checkpoints in it, or start it with a larger --max-bytes "
                    "(DCP_KEEPER_MAX_BYTES)"
                )
        self.total += nbytes

    def release(self, nbytes: int) -> None:
        """Count bytes as free."""
        self.total -= nbytes

    def make(self, nbytes: int, done: Callable[[Segment | OSError], None], *, zeroed: bool) -> None:
        """Allocate a segment; `collect` calls `done` with it or an error. Raises MemoryError."""
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
        while len(self.segments) + self._making >= (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2):
            if not self.reclaim():
                raise MemoryError(
                    f"another {nbytes:,} bytes would take more than half of the open files that the keeper may have "
                    f"({limit:,}): raise its `ulimit -n`"
                )
        self.reserve(nbytes)
        # The thread frees what was destroyed before it allocates this.
        while (free := self._free_bytes() + self._freeing) < nbytes:
            if not self.reclaim():
                self.release(nbytes)
                raise MemoryError(
                    f"{nbytes:,} bytes more do not fit: this machine, or the control group (container) of the keeper, "
                    f"has {free:,} left. Keep fewer checkpoints in it, or give it more memory"
                )

    def destroy(self, segment: Segment) -> None:
        """Free an unused segment."""
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
        """Deliver allocated segments."""
        while self._results:
            self._results.popleft()()

    def close(self, used: Callable[[Segment], bool]) -> None:
        """End the thread, and free all segments."""
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
    """Describe a failed allocation."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"the keeper has too many open files for another {nbytes:,} bytes of memory: raise its `ulimit -n`"
    return f"the keeper could not allocate {nbytes:,} bytes: {error.strerror or error}"


_STEP_BYTES = 16 << 20
_ZEROS = bytes(4 << 20)
_LOCK = struct.Struct("hhqqi4x")
_FIRST_MARK = 1 << 40  # beyond the last byte of any segment
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Segment:
    """A memory file of the keeper."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._descriptor = descriptor
        self.nbytes = nbytes
        status = os.fstat(descriptor)
        self.inode, self.device = status.st_ino, status.st_dev

    def open_for(self, number: int) -> int:
        """Return a new descriptor, marked with the number of its client."""
        try:
            descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # no /proc: without a mark, memory counts as unused when its client is gone
            return os.dup(self._descriptor)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK, number))
        except OSError:  # a system without such locks
            pass
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def is_open_for(self, number: int) -> bool:
        """Return whether any process still has a client's descriptor or mapping."""
        try:
            found = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, number))
        except OSError:
            return False
        return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def free(self) -> None:
        """Free the memory, even if clients have it mapped; they must not use it any more."""
        try:
            with mmap.mmap(self._descriptor, self.nbytes) as memory:
                for start in range(0, self.nbytes, _STEP_BYTES):
                    memory.madvise(mmap.MADV_REMOVE, start, min(_STEP_BYTES, self.nbytes - start))
        except OSError:
            pass  # then the memory is free as soon as no client has it mapped
        self.close()

    def close(self) -> None:
        """Close the file: its memory is free when no client has it mapped."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def make_segment(nbytes: int, available: Callable[[], int], *, zeroed: bool) -> Segment:
    """Make a memory file in which all pages exist; `nbytes` is a multiple of the page size.

    Pages are written if `zeroed`, so that mapping them is cheap. `available` is called repeatedly. Raises OSError.
    """
    descriptor = os.memfd_create("dcp-keeper", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        for start in range(0, nbytes, _STEP_BYTES):
            size = min(_STEP_BYTES, nbytes - start)
            _touch(descriptor, start, size, available(), zeroed=zeroed)
        return Segment(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise


def _touch(descriptor: int, start: int, size: int, available: int, *, zeroed: bool) -> None:
    if available < size:
        raise OSError(errno.ENOSPC, f"no memory is left after {start:,} bytes")
    if not zeroed:
        os.posix_fallocate(descriptor, start, size)
        return
    stop = start + size
    while start < stop:
        start += os.pwrite(descriptor, memoryview(_ZEROS)[: stop - start], start)


def _lock(kind: int, number: int) -> bytes:
    return _LOCK.pack(kind, os.SEEK_SET, _FIRST_MARK + number, 1, 0)


_GROUPS = "/sys/fs/cgroup"
_CACHE = ("inactive_file", "active_file")


def available_bytes(groups: str = _GROUPS, proc: str = "/proc") -> int:
    """Return how many bytes this process could allocate now, without swapping and without being killed."""
    found = [_machine(proc)]
    for controllers, path in _memberships(proc):
        if "memory" in controllers:
            found += _limits(f"{groups}/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        elif not any(controllers):
            found += _limits(groups, path, "memory.max", "memory.current", "")
    return max(0, min(found))


def _machine(proc: str) -> int:
    for line in _lines(f"{proc}/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memberships(proc: str) -> Iterator[tuple[list[str], str]]:
    for line in _lines(f"{proc}/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        yield controllers.split(","), path


def _limits(mount: str, path: str, limit_name: str, usage_name: str, prefix: str) -> Iterator[int]:
    while True:
        folder = f"{mount}{path}".rstrip("/")
        limit, usage = _number(f"{folder}/{limit_name}"), _number(f"{folder}/{usage_name}")
        if limit is not None and usage is not None and limit < 1 << 60:
            cache = dict(line.split(" ", 1) for line in _lines(f"{folder}/memory.stat") if " " in line)
            yield limit - usage + sum(int(cache.get(prefix + name, 0)) for name in _CACHE)
        if path in ("", "/"):
            return
        path = path.rpartition("/")[0]


def _number(path: str) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
