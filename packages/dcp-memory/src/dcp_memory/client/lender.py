"""`Lender`: borrows memory of a keeper for this process, in which savers stage; see `dcp_io.MemoryLender`."""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dcp_io import note_mapping
from dcp_memory.client.link import Answer, Link, NoKeeperError
from dcp_memory.client.mapped import MemoryFile, keep_from_children
from dcp_memory.errors import KeeperLostError

__all__ = ["Lender", "Loan"]

_WAIT_SECONDS = 0.0005
_LONGEST_WAIT_SECONDS = 0.02
# Other threads of the process wait so long at a time, about a millisecond.
_POPULATE_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; not in the module `mmap`


class Loan:
    """Memory of a keeper, mapped in this process; the same object each time that it is lent to this process.

    Args:
        file: The segment.
        nbytes: Its size.
        give_back: Function that ends the loan.
    """

    def __init__(self, file: MemoryFile, nbytes: int, give_back: Callable[[Loan], object]) -> None:
        self._file = file
        self.nbytes = nbytes
        """Size of the memory in bytes."""
        self.memory = mmap.mmap(file.descriptor, nbytes, mmap.MAP_SHARED)
        """The memory, whose pages exist and are mapped."""
        keep_from_children(self.memory)
        note_mapping(self.memory, file.descriptor)
        _populate(self.memory)
        self.closed = False
        """Whether the keeper has freed the memory, or has ended."""
        self.lent = False
        """Whether this process has it now."""
        self._give_back = give_back

    @property
    def inode(self) -> int:
        """Inode of the segment."""
        return self._file.inode

    @property
    def descriptor(self) -> int:
        """File descriptor of the memory file."""
        return self._file.descriptor

    def give_back(self) -> None:
        """End the loan; what objects refer to stays with them."""
        if self.lent:
            self.lent = False
            self._give_back(self)


class Lender:
    """Lender of the memory of a keeper to this process.

    The keeper allocates no more than one checkpoint more than it keeps, of the sizes that were lent last, unless a loan
    has waited for its time.

    Args:
        link: Connection to the keeper.
        options: Options of the keeper if it is started here.
    """

    def __init__(self, link: Link, options: Mapping[str, Any]) -> None:
        self._link, self._options = link, options
        self._lock = threading.Lock()
        self._mapping_lock = threading.Lock()
        self._loans: dict[tuple[int, int], Loan] = {}
        self._destroyed = 0
        link.when_lost.append(self._lose)

    def lend(self, nbytes: int, *, seconds: float) -> Loan:
        """Lend memory of at least `nbytes` bytes; starts the keeper if there is none.

        Args:
            nbytes: Number of bytes, at least 1.
            seconds: Time to wait for memory that is in use, before more is allocated.

        Raises:
            KeeperFullError: There is no memory for this; the message has the sizes, and what to do.
            KeeperLostError: The keeper does not answer.
            KeeperStartError: It could not be started.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes={nbytes} must be at least 1")
        deadline, pause = time.monotonic() + seconds, _WAIT_SECONDS
        while True:
            force = time.monotonic() >= deadline
            request = {"do": "lend", "nbytes": nbytes, "prepare": False, "force": force}
            answer = self._link.insist(self._options, request)
            if not answer.fields.get("wait"):
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_SECONDS)
        try:
            loan = self._loan(answer)
        except BaseException:
            with contextlib.suppress(OSError, NoKeeperError):
                self._ask({"do": "give_back", "segment": answer.fields["segment"]}, answer.epoch)
            raise
        loan.lent = True
        self._close_destroyed(answer)
        return loan

    def prepare(self, nbytes: int) -> None:
        """Have memory of this size allocated and mapped for the next loan, as far as the keeper's allowance goes."""
        try:
            self._prepare(nbytes)
        except (OSError, NoKeeperError):  # `lend` meets it again
            return

    def abandon(self) -> None:
        """Forget everything in a forked child, which has none of it mapped."""
        self._lock, self._mapping_lock = threading.Lock(), threading.Lock()
        self._lose()

    def _prepare(self, nbytes: int) -> None:
        pause = _WAIT_SECONDS
        while True:
            answer = self._link.ask({"do": "lend", "nbytes": max(1, nbytes), "prepare": True})
            if not answer.fields.get("wait"):
                break
            if not answer.fields["making"]:
                return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_SECONDS)
        self._loan(answer)

    def _ask(self, fields: Mapping[str, Any], epoch: int | None = None) -> Answer:
        try:
            return self._link.ask(fields, epoch=epoch)
        except NoKeeperError:
            raise KeeperLostError(f"the keeper of {self._link.name} has ended") from None

    def _loan(self, answer: Answer) -> Loan:
        """Return the loan of a segment, which is mapped if it is new to this process."""
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
            got = self._ask({"do": "descriptor", "segment": inode}, answer.epoch)
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
            with contextlib.suppress(OSError, NoKeeperError):
                self._link.ask({"do": "give_back", "segment": loan.inode}, epoch=epoch)

    def _close_destroyed(self, answer: Answer) -> None:
        """Close loans whose memory the keeper has freed since the last answer."""
        if answer.fields["destroyed"] == self._destroyed:
            return
        self._destroyed = answer.fields["destroyed"]
        with self._lock:
            inodes = [inode for epoch, inode in self._loans if epoch == answer.epoch]
        gone = self._ask({"do": "gone", "segments": inodes}, answer.epoch).fields["gone"]
        with self._lock:
            for inode in gone:
                self._loans.pop((answer.epoch, inode)).closed = True

    def _lose(self) -> None:
        """Close all loans of a connection that has ended."""
        with self._lock:
            loans, self._loans = self._loans, {}
        for loan in loans.values():
            loan.closed = True


def _populate(memory: mmap.mmap) -> None:
    """Map the pages of a memory file now, in steps, rather than with a fault for each when it is written."""
    for start in range(0, len(memory), _POPULATE_BYTES):
        size = min(_POPULATE_BYTES, len(memory) - start)
        try:
            memory.madvise(_MADV_POPULATE_WRITE, start, size)
        except OSError:  # an old kernel: a read of each page maps it, too
            bytes(memory[start : start + size : mmap.PAGESIZE])
        time.sleep(0)  # other threads go on
