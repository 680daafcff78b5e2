"""Segments of a keeper in this process: their descriptors, and mappings of them for reading; few are kept at a time."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from dcp_io import note_mapping
from dcp_memory.client.link import Link

__all__ = ["MemoryFile", "Segments"]

_KEPT = 64


class MemoryFile:
    """A segment of a keeper, open in this process until the last reference to this object is gone.

    Args:
        inode: Inode of the segment.
        descriptor: File descriptor, which is closed with this object.
        nbytes: Size of the segment.
        lent: Whether objects may refer to it instead of copying from it.
    """

    def __init__(self, inode: int, descriptor: int, nbytes: int, *, lent: bool) -> None:
        self.inode, self.descriptor, self.nbytes, self._lent = inode, descriptor, nbytes, lent
        self._lock = threading.Lock()
        self._mapped: npt.NDArray[np.uint8] | None = None
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False
        _open_files.add(self)

    def mapped(self) -> npt.NDArray[np.uint8]:
        """Return the memory, read-only; it stays mapped as long as the array is referenced."""
        with self._lock:
            if self._mapped is None:
                memory = mmap.mmap(self.descriptor, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
                keep_from_children(memory)
                if self._lent:
                    note_mapping(memory, self.descriptor)
                self._mapped = np.frombuffer(memory, np.uint8)
            return self._mapped


class Segments:
    """Segments of a keeper that this process has used last.

    Args:
        link: Connection to the keeper.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[int, int], MemoryFile] = OrderedDict()
        link.when_lost.append(self.forget)

    def get(self, inode: int, epoch: int) -> MemoryFile:
        """Return a segment.

        Args:
            inode: Its inode.
            epoch: Connection on which the keeper has named it.

        Raises:
            KeeperLostError: That connection is lost.
            OSError: This process has too many open files.
        """
        key = epoch, inode
        with self._lock:
            found = self._files.get(key)
            if found is not None:
                self._files.move_to_end(key)
                return found
        answer = self._link.ask({"do": "descriptor", "segment": inode}, epoch=epoch)
        if answer.descriptor is None:
            raise OSError(f"{self._link.name}: the keeper has sent no descriptor")
        made = MemoryFile(inode, answer.descriptor, answer.fields["nbytes"], lent=answer.fields["lent"])
        with self._lock:
            if epoch == self._link.epoch:
                self._files[key] = made
            while len(self._files) > _KEPT:
                self._files.popitem(last=False)
        return made

    def forget(self) -> None:
        """Close all segments that are not in use."""
        with self._lock:
            self._files.clear()

    def abandon(self) -> None:
        """Forget all segments in a forked child, whose lock may be held by a thread that it does not have."""
        self._lock = threading.Lock()
        self._files.clear()


_open_files: weakref.WeakSet[MemoryFile] = weakref.WeakSet()
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_never_freed: list[object] = []


def keep_from_children(memory: mmap.mmap) -> None:
    """Leave a mapping out of forked children: they would keep its memory in use, and see it change."""
    memory.madvise(mmap.MADV_DONTFORK)
    _mappings.add(memory)


def _close_in_child() -> None:
    """Close memory files in a forked child: held open, their memory would count as used when the parent has ended.

    A mapping has a descriptor of its own, too. Descriptors are replaced by harmless ones, and mappings never freed: the
    child has something else at their addresses.
    """
    files = [*_open_files]
    _never_freed.extend([*_mappings, *files])
    found = {_identity(each.descriptor) for each in files} - {None}
    if not found:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            if _identity(int(name)) in found:
                os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


os.register_at_fork(after_in_child=_close_in_child)
