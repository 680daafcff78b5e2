"""Connections to keepers, one per keeper, with mapped segments and the lender of memory."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_io.lent_memory import FileId
from dcp_memory.client.link import Answer, Link, NoKeeperError
from dcp_memory.places import folder_path

_KEPT = 64


class MemoryFile:
    """A segment. It owns `descriptor`, until the last reference to this object is gone.

    Objects may refer to a `lent` segment; bytes of others are copied.
    """

    def __init__(self, inode: int, descriptor: int, nbytes: int, *, lent: bool) -> None:
        self.inode, self.descriptor, self.nbytes, self._lent = inode, descriptor, nbytes, lent
        self._lock = threading.Lock()
        self._mapped: npt.NDArray[np.uint8] | None = None
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False
        _open_files.add(self)

    def mapped(self) -> npt.NDArray[np.uint8]:
        """Return the memory, read-only; mapped as long as the array is referenced."""
        with self._lock:
            if self._mapped is None:
                memory = mmap.mmap(self.descriptor, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
                keep_from_children(memory)
                if self._lent:
                    FileId.note(memory, self.descriptor)
                self._mapped = np.frombuffer(memory, np.uint8)
            return self._mapped


class Segments:
    """The segments that this process used last."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[int, int], MemoryFile] = OrderedDict()
        link.when_lost.append(self.forget)

    def get(self, inode: int, epoch: int) -> MemoryFile:
        """Return a segment. Raises KeeperLostError, or OSError if too many files are open."""
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
        """Close all unused segments."""
        with self._lock:
            self._files.clear()

    def abandon(self) -> None:
        """Forget all in a forked child: a missing thread may hold the lock."""
        self._lock = threading.Lock()
        self._files.clear()


_open_files: weakref.WeakSet[MemoryFile] = weakref.WeakSet()
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_never_freed: list[object] = []


def keep_from_children(memory: mmap.mmap) -> None:
    """Leave a mapping out of forked children, which would keep its memory in use."""
    memory.madvise(mmap.MADV_DONTFORK)
    _mappings.add(memory)


def _close_in_child() -> None:
    """Close memory files, which would count as used after the parent has ended.

    Descriptors are replaced by harmless ones. Mappings are never freed: the child uses their addresses otherwise.
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


FIRST_POLL_SECONDS = 0.0005
LONGEST_POLL_SECONDS = 0.02
# Other threads of the process wait so long at a time, about a millisecond.
_POPULATE_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; not in the module `mmap`


class Loan:
    """Mapped memory of a keeper. Repeated loans of a segment are the same object."""

    def __init__(self, file: MemoryFile, nbytes: int, give_back: Callable[[Loan], object]) -> None:
        self._file = file
        self.nbytes = nbytes
        self.memory = mmap.mmap(file.descriptor, nbytes, mmap.MAP_SHARED)
        keep_from_children(self.memory)
        FileId.note(self.memory, file.descriptor)
        _populate(self.memory)
        self.closed = False
        """Whether the keeper has freed the memory, or has ended."""
        self.lent = False
        self._give_back = give_back

    @property
    def inode(self) -> int:
        """Inode of the segment."""
        return self._file.inode

    @property
    def descriptor(self) -> int:
        """Descriptor of the memory file."""
        return self._file.descriptor

    def give_back(self) -> None:
        """End the loan. Objects in the memory keep it."""
        if self.lent:
            self.lent = False
            self._give_back(self)


class Lender:
    """Lender of a keeper's memory to this process; see `dcp_io.MemoryLender`.

    The keeper allocates at most one checkpoint more than it keeps, unless a loan has waited for its time.
    """

    def __init__(self, link: Link, options: Mapping[str, Any]) -> None:
        self._link, self._options = link, options
        self._lock = threading.Lock()
        self._mapping_lock = threading.Lock()
        self._loans: dict[tuple[int, int], Loan] = {}
        self._destroyed = 0
        link.when_lost.append(self._lose)

    def lend(self, nbytes: int, *, timeout_seconds: float) -> Loan:
        """Lend at least `nbytes` (1 or more), newly allocated after `timeout_seconds`; start a keeper if needed.

        Raises StorageError (`errno` is ENOSPC) if memory is missing or no keeper starts, or KeeperLostError.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes={nbytes} must be at least 1")
        deadline, pause = time.monotonic() + timeout_seconds, FIRST_POLL_SECONDS
        while True:
            force = time.monotonic() >= deadline
            request = {"do": "lend", "nbytes": nbytes, "prepare": False, "force": force}
            answer = self._link.insist(self._options, request)
            if not answer.fields.get("wait"):
                break
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
        try:
            loan = self._loan(answer)
        except BaseException:
            with contextlib.suppress(OSError):
                self._link.ask({"do": "give_back", "segment": answer.fields["segment"]}, epoch=answer.epoch)
            raise
        loan.lent = True
        self._close_destroyed(answer)
        return loan

    def prepare(self, nbytes: int) -> None:
        """Allocate and map memory for the next loan, within the keeper's allowance."""
        try:
            self._prepare(nbytes)
        except (OSError, NoKeeperError):  # `lend` meets it again
            return

    def abandon(self) -> None:
        """Forget everything in a forked child."""
        self._lock, self._mapping_lock = threading.Lock(), threading.Lock()
        self._lose()

    def _prepare(self, nbytes: int) -> None:
        pause = FIRST_POLL_SECONDS
        while True:
            answer = self._link.ask({"do": "lend", "nbytes": max(1, nbytes), "prepare": True})
            if not answer.fields.get("wait"):
                break
            if not answer.fields["making"]:
                return
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
        self._loan(answer)

    def _loan(self, answer: Answer) -> Loan:
        inode, nbytes = answer.fields["segment"], answer.fields["nbytes"]
        key = answer.epoch, inode
        with self._lock:
            found = self._loans.get(key)
        if found is not None:
            return found
        with self._mapping_lock:
            with self._lock:
                found = self._loans.get(key)
            if found is not None:
                return found
            got = self._link.ask({"do": "descriptor", "segment": inode}, epoch=answer.epoch)
            if got.descriptor is None:
                raise OSError(errno.EBADF, f"{self._link.name}: the keeper has sent no descriptor")
            made = Loan(MemoryFile(inode, got.descriptor, nbytes, lent=True), nbytes, self._give_back)
            with self._lock:
                if answer.epoch != self._link.epoch:
                    made.closed = True
                else:
                    self._loans[key] = made
            return made

    def _give_back(self, loan: Loan) -> None:
        with self._lock:
            epoch = next((key[0] for key, each in self._loans.items() if each is loan), None)
        if epoch is not None:  # otherwise its keeper has ended
            with contextlib.suppress(OSError):
                self._link.ask({"do": "give_back", "segment": loan.inode}, epoch=epoch)

    def _close_destroyed(self, answer: Answer) -> None:
        if answer.fields["destroyed"] == self._destroyed:
            return
        self._destroyed = answer.fields["destroyed"]
        with self._lock:
            inodes = [inode for epoch, inode in self._loans if epoch == answer.epoch]
        gone = self._link.ask({"do": "gone", "segments": inodes}, epoch=answer.epoch).fields["gone"]
        with self._lock:
            for inode in gone:
                self._loans.pop((answer.epoch, inode)).closed = True

    def _lose(self) -> None:
        with self._lock:
            loans, self._loans = self._loans, {}
        for loan in loans.values():
            loan.closed = True


def _populate(memory: mmap.mmap) -> None:
    """Map pages in steps, which is cheaper than a fault for each."""
    for start in range(0, len(memory), _POPULATE_BYTES):
        size = min(_POPULATE_BYTES, len(memory) - start)
        try:
            memory.madvise(_MADV_POPULATE_WRITE, start, size)
        except OSError:  # an old kernel: a read of each page maps it, too
            bytes(memory[start : start + size : mmap.PAGESIZE])
        time.sleep(0)  # other threads go on


class Connection:
    """A connection to one keeper, with segments and lender."""

    def __init__(self, folder: str, run: str) -> None:
        self.link = Link(folder, run)
        self.segments = Segments(self.link)
        self._lender: Lender | None = None

    def lender(self, options: Mapping[str, Any]) -> Lender:
        """Return the lender of the keeper's memory."""
        if self._lender is None:
            self._lender = Lender(self.link, options)
        return self._lender

    def abandon(self) -> None:
        """Leave everything to the parent, in a forked child."""
        self.link.abandon()
        self.segments.abandon()
        if self._lender is not None:
            self._lender.abandon()


_lock = threading.Lock()
_connections: dict[tuple[str, str], Connection] = {}


def connection_to(run: str) -> Connection:
    """Return the connection to a run's keeper, which may not exist yet."""
    key = folder_path(), run
    with _lock:
        found = _connections.get(key)
        if found is None:
            found = _connections[key] = Connection(*key)
        return found


def _abandon() -> None:
    global _lock  # noqa: PLW0603 - a thread of the parent may hold the old one
    _lock = threading.Lock()
    for each in _connections.values():
        each.abandon()


os.register_at_fork(after_in_child=_abandon)


def forget_connections(folder: str) -> None:
    """Close the connections to all keepers of a folder."""
    with _lock:
        for key in [key for key in _connections if key[0] == folder]:
            _connections.pop(key).link.close()
