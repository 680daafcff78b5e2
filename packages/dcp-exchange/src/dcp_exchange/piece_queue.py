"""The queue of pieces that one rank reads, and their reader."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

from dcp_io import Source, StoreBackend
from dcp_io.reading.delivery import Delivery
from dcp_manifest import CheckpointNotFoundError, CorruptCheckpointError

# A rank takes its pieces in so many runs at most: each costs a request to the store of the process group, and a rank
# that has become slow keeps others waiting for the rest of one run.
_RUNS = 64
_HELPED = 16


class PieceQueue:
    """The pieces that one rank reads: its own, then pieces that slower ranks have not begun. Thread-safe.

    With tickets (`take`), a run of an owner's pieces goes to the first rank that takes it: the owner, or a rank that
    has finished its own and lists the owner in `helped`. Without tickets, each rank reads its own.
    """

    def __init__(
        self, owners: Sequence[int], rank: int, take: Callable[[int], int] | None, helped: Sequence[int] = ()
    ) -> None:
        self._rank = rank
        wanted = {rank, *(helped if take is not None else ())}
        self._pieces: dict[int, list[int]] = {owner: [] for owner in wanted}
        for piece, owner in enumerate(owners):
            if owner in wanted:
                self._pieces[owner].append(piece)
        self._take = take
        self._victims = deque([rank, *(helped if take is not None else ())])
        self._run: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def own(self) -> int:
        """Number of this rank's own pieces."""
        return len(self._pieces[self._rank])

    def next(self) -> int | None:
        """Return the next piece to read, or None; raise CoordinatorLostError if the store does not answer."""
        with self._lock:
            while not self._run and self._victims:
                owner = self._victims[0]
                pieces = self._pieces[owner]
                size = max(1, -(-len(pieces) // _RUNS)) if self._take is not None else max(1, len(pieces))
                ticket = 0
                if pieces and self._take is not None:
                    ticket = self._take(owner)
                self._run.extend(pieces[ticket * size : (ticket + 1) * size])
                if not self._run or self._take is None:
                    self._victims.popleft()
            return self._run.popleft() if self._run else None


def helped(rank: int, hosts: Sequence[Sequence[int]], *, near_only: bool = False) -> list[int]:
    """Return the ranks to help: those of the same host, then, unless `near_only`, some of other hosts."""
    near = next(host for host in hosts if rank in host)
    others = [] if near_only else [member for host in hosts if host is not near for member in host]
    mine = [member for member in near if member > rank] + [member for member in near if member < rank]
    step = max(1, len(others) // _HELPED)
    return mine + [others[(rank + number * step) % len(others)] for number in range(min(_HELPED, len(others)))]


class PieceReader:
    """Reads pieces of a checkpoint's files."""

    def __init__(self, backend: StoreBackend, delivery: Delivery) -> None:
        self._backend = backend
        self._delivery = delivery
        self._own = threading.local()
        self._lock = threading.Lock()
        self._opened: list[Source] = []
        self.bytes_read = 0

    def read(self, file: str, start: int, buffer: memoryview) -> None:
        """Fill the buffer with bytes of a file from `start` on.

        Raises CheckpointReplacedError if a newer save replaced the checkpoint.
        """
        with self._backend.noticing_replacement():
            try:
                self._open(file).read_into(start, [buffer])
            except CheckpointNotFoundError as error:
                raise CheckpointNotFoundError(f"{error}{self._key_in(file, start, len(buffer))}") from error
            except CorruptCheckpointError as error:
                if error.key is not None:
                    raise
                raise CorruptCheckpointError(f"{error}{self._key_in(file, start, len(buffer))}", file=file) from error
        with self._lock:
            self.bytes_read += len(buffer)

    def close(self) -> None:
        """Close all files."""
        for source in self._opened:
            with contextlib.suppress(Exception):
                source.close()
        self._opened.clear()

    def _open(self, file: str) -> Source:
        """Return a file's source. Each thread keeps one open: its pieces come from few files."""
        known: tuple[str, Source] | None = getattr(self._own, "source", None)
        if known is not None and known[0] == file:
            return known[1]
        if known is not None:
            with self._lock:
                self._opened.remove(known[1])
            known[1].close()
            self._own.source = None
        source = self._backend.store.open(file)
        with self._lock:
            self._opened.append(source)
        self._own.source = file, source
        return source

    def _key_in(self, file: str, start: int, size: int) -> str:
        key = self._delivery.key_at(file, start, start + size)
        return "" if key is None else f"; {key!r} is stored in it"
