"""`PieceQueue`: which pieces one rank reads: first its own, then those that slower ranks have not begun."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

__all__ = ["PieceQueue", "helped"]

# A rank takes its pieces in so many runs at most: each costs a request to the store of the process group, and a rank
# that has become slow keeps others waiting for the rest of one run.
_RUNS = 64
_HELPED = 16


class PieceQueue:
    """The pieces that one rank reads. Thread-safe.

    With tickets, each run of an owner's pieces goes to the rank that takes it first: the owner, or a rank that has
    nothing left to read. Without tickets, each rank reads its own pieces.

    Args:
        owners: Owner of each piece.
        rank: This rank.
        take: Function that takes the next ticket of an owner's queue; None for no tickets.
        helped: Other ranks whose pieces this rank reads when it has read its own, in this order.
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
        """Number of the pieces of which this rank is the owner."""
        return len(self._pieces[self._rank])

    def next(self) -> int | None:
        """Return the number of the piece to read next; None if there is none left for this rank.

        Raises:
            CoordinatorLostError: The store of the process group does not answer any more.
        """
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
    """Return the ranks whose pieces a rank reads when it has read its own: those of its host, then some of others.

    Args:
        rank: The rank.
        hosts: Ranks of each host.
        near_only: Whether to leave out the others, as each host has objects of its own.
    """
    near = next(host for host in hosts if rank in host)
    others = [] if near_only else [member for host in hosts if host is not near for member in host]
    mine = [member for member in near if member > rank] + [member for member in near if member < rank]
    step = max(1, len(others) // _HELPED)
    return mine + [others[(rank + number * step) % len(others)] for number in range(min(_HELPED, len(others)))]
