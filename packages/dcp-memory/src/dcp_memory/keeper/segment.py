"""`Segment`: a memory file of fixed size that the keeper has allocated, so that its control group pays for the pages.

Source: Linux `memfd_create(2)`; `fcntl(2)`, open file description locks: they last as long as the description is open
or mapped in any process, which is how the keeper knows whether a dead client's memory is still used by its children.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable

__all__ = ["Segment", "make_segment"]

_STEP_BYTES = 16 << 20
_ZEROS = bytes(4 << 20)
_LOCK = struct.Struct("hhqqi4x")
_FIRST_MARK = 1 << 40  # beyond the last byte of any segment
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Segment:
    """A memory file of the keeper.

    Args:
        descriptor: File descriptor of the memory file.
        nbytes: Its size.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._descriptor = descriptor
        self.nbytes = nbytes
        status = os.fstat(descriptor)
        self.inode, self.device = status.st_ino, status.st_dev

    def open_for(self, number: int) -> int:
        """Return a new descriptor of the memory file, marked with the number of the client that gets it."""
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
        """Return whether a descriptor that a client got, or a mapping of it, is still in use in any process."""
        try:
            found = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, number))
        except OSError:
            return False
        return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def free(self) -> None:
        """Free the memory, also where clients have it mapped; they must not use it any more."""
        try:
            with mmap.mmap(self._descriptor, self.nbytes) as memory:
                for start in range(0, self.nbytes, _STEP_BYTES):
                    memory.madvise(mmap.MADV_REMOVE, start, min(_STEP_BYTES, self.nbytes - start))
        except OSError:
            pass  # then the memory is free as soon as no client has it mapped
        self.close()

    def close(self) -> None:
        """Close the memory file: its memory is free when no client has it mapped."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def make_segment(nbytes: int, available: Callable[[], int], *, zeroed: bool) -> Segment:
    """Make a memory file all of whose pages exist.

    Args:
        nbytes: Size of the segment; a multiple of the page size.
        available: Returns how many bytes may be allocated now; asked again and again.
        zeroed: Whether the pages are written, so that mapping them costs little; else they are only reserved.

    Raises:
        OSError: There is not enough memory (ENOSPC), or there are too many open files.
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
