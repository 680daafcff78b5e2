"""`Streams`: connections between the ranks of one operation, opened on demand."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from dcp_ranks.errors import OperationError, StreamError
from dcp_ranks.options import DEFAULT_PEERS, PeerOptions
from dcp_ranks.streams.attempt import Attempt
from dcp_ranks.streams.cards import StreamCard, host_hint
from dcp_ranks.streams.dispatcher import Dispatcher
from dcp_ranks.streams.greetings import is_local
from dcp_ranks.streams.meeting import Doorway, meet_ranks
from dcp_ranks.streams.reception import StreamHandler
from dcp_ranks.streams.stream import Stream
from dcp_ranks.transport.listening import Listener, addresses_to_announce, open_doors

if TYPE_CHECKING:
    from typing_extensions import Self

_CONNECT_TIMEOUT_SECONDS: Final = 15.0
_BACKLOG: Final = 4096
_SILENT: Final = (
    "it did not connect to this rank within {:.1f} s: it is stopped, cannot reach this rank, or does not connect"
)


class Streams:
    """Connections of one rank to the other ranks of one operation, opened on demand; a context manager.

    Two connecting ranks prove to each other that they know the job's secret. Later data is neither encrypted nor
    protected against changes in the network. Ranks use a Unix socket within a host, else TCP on the addresses of
    `PeerOptions.network`. Leaving the block closes all sockets, threads and descriptors, and without an exception says
    goodbye to all ranks. A forked child has no streams.

    Args:
        rank: Rank of this process within the group.
        secret: Secret of the job, the same on all ranks; see `job_secret`.
        options: The same on all ranks; None for the defaults.
        store: Store of the process group, used to find the ranks' network; None for all addresses of this host.
        timeout_seconds: Seconds after which a rank that takes no bytes counts as lost; over TCP at most
            `PeerOptions.peer_timeout_seconds`.
        lost: Returns lost rank → how; if any rank is lost, connecting stops waiting.

    Example:
        ```python
        import secrets
        from dcp_ranks import Stream, Streams, job_secret, make_coordinator

        with make_coordinator() as ranks:  # on every rank
            secret = job_secret(ranks.broadcast("draw a secret", lambda: secrets.token_bytes(32)))
            with Streams(ranks.rank, secret) as streams:
                streams.meet(ranks.all_gather("exchange cards", lambda: streams.card))
                others = {*range(ranks.world_size)} - {ranks.rank}
                for found in streams.connect_many(others, timeout_seconds=10).values():
                    if isinstance(found, Stream):
                        found.send(b"hello")
        ```
    """

    def __init__(
        self,
        rank: int,
        secret: bytes,
        *,
        options: PeerOptions | None = None,
        store: Any = None,
        timeout_seconds: float = 120.0,
        lost: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self._rank = rank
        self._secret = secret
        self._options = options or DEFAULT_PEERS
        self._timeout_seconds = timeout_seconds
        self._lost = lost
        self._cards: dict[int, StreamCard] = {}
        self._streams: dict[int, Stream] = {}
        self._replaced: list[Stream] = []
        self._dispatcher: Dispatcher | None = None
        self._connecting = threading.Lock()
        self._closed = False
        listener = Listener(secret)
        doors, addresses, port = open_doors(addresses_to_announce(store, self._options.network), self._options.ports)
        local, name = _open_local_door()
        self._doorway = Doorway([*doors, *local], listener)
        self.card = StreamCard(rank, host_hint(), name, addresses, port, listener.challenge)
        """This rank's card, for the other ranks' `meet`."""
        _alive.add(self)

    @property
    def sockets(self) -> int:
        """Number of open sockets, listening ones included."""
        doorway = self._doorway
        made = 0 if self._closed else len(self._streams) + len(self._replaced)
        return len(doorway.doors) + len(doorway.guests.waiting) + len(doorway.arrived) + made

    @property
    def made(self) -> dict[int, Stream]:
        """Rank → stream, including lost ones."""
        return dict(self._streams)

    def meet(self, cards: Iterable[StreamCard]) -> None:
        """Take the other ranks' cards; opens no connection."""
        self._cards = {card.rank: card for card in cards}

    def connect(self, rank: int, timeout_seconds: float | None = None) -> Stream:
        """Return the stream to a rank, which must also connect to this rank, in any order.

        A live stream is returned immediately. A firewall that drops packets costs 3 s per address of the other rank.

        Raises:
            StreamError: The connection cannot be made within the timeout.
            OperationError: The rank is unknown (see `meet`) or this rank, or the streams are closed.
        """
        found = self.connect_many([rank], timeout_seconds)[rank]
        if isinstance(found, StreamError):
            raise found
        return found

    def connect_many(
        self, ranks: Collection[int], timeout_seconds: float | None = None
    ) -> dict[int, Stream | StreamError]:
        """Connect to several ranks in parallel; return rank → stream or error.

        By default, waits for 15 s at most, and not longer than these streams wait for anything.

        Raises:
            OperationError: As for `connect`.
        """
        started = time.monotonic()
        if timeout_seconds is None:
            timeout_seconds = min(self._timeout_seconds, _CONNECT_TIMEOUT_SECONDS)
        self._check(ranks)
        if not self._connecting.acquire(timeout=timeout_seconds):
            busy = "another thread of this rank is connecting"
            return {rank: StreamError(rank, "", busy) for rank in ranks}
        try:
            return self._connect_many(ranks, started + timeout_seconds)
        finally:
            self._connecting.release()

    def dispatch(self, handler: StreamHandler) -> Dispatcher:
        """Return the dispatcher that receives from all present and future streams.

        Raises:
            OperationError: A dispatcher exists already, or the streams are closed.
        """
        if self._closed or self._dispatcher is not None:
            raise OperationError("these streams are closed, or have a dispatcher already")
        self._dispatcher = Dispatcher(handler)
        for stream in self._streams.values():
            if stream.lost is None:
                self._dispatcher.add(stream)
        return self._dispatcher

    def close(self) -> None:
        """Close all sockets and the dispatcher, as `Dispatcher.close` does; later calls do nothing."""
        if self._closed:
            return
        if self._dispatcher is not None:
            self._dispatcher.check_caller()
        self._closed = True
        try:
            if self._dispatcher is not None:
                self._dispatcher.close()
        finally:
            self._doorway.close()
            for stream in (*self._streams.values(), *self._replaced):
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            for stream in self._streams.values():
                stream.goodbye()
            self.close()
        else:
            with contextlib.suppress(BaseException):  # the first error is the one to know
                self.close()

    def _check(self, ranks: Iterable[int]) -> None:
        if self._closed:
            raise OperationError("these streams are closed")
        for rank in ranks:
            if rank == self._rank or rank not in self._cards:
                raise OperationError(
                    f"rank {self._rank} has no card of rank {rank}"
                    if rank != self._rank
                    else "a rank does not connect to itself"
                )

    def _connect_many(self, ranks: Collection[int], deadline: float) -> dict[int, Stream | StreamError]:
        wanted = [rank for rank in ranks if not self._is_live(rank) and not self._doorway.has(rank)]
        now = time.monotonic()
        host = self.card.host
        attempts = {
            rank: Attempt(self._cards[rank], self._rank, host, self._secret, now)
            for rank in wanted
            if rank < self._rank
        }
        awaited = [rank for rank in wanted if rank > self._rank]
        try:
            meet_ranks(self._doorway, attempts.values(), awaited, deadline, self._lost)
            waited = time.monotonic() - now
            return {rank: self._result(rank, attempts.get(rank), waited) for rank in ranks}
        finally:
            for attempt in attempts.values():
                attempt.close()

    def _is_live(self, rank: int) -> bool:
        return rank in self._streams and self._streams[rank].lost is None and not self._streams[rank].has_left

    def _result(self, rank: int, attempt: Attempt | None, waited_seconds: float) -> Stream | StreamError:
        if attempt is not None and attempt.is_done and attempt.connection is not None:
            return self._make(rank, attempt.connection, attempt.where)
        if attempt is not None:
            return StreamError(rank, "", attempt.give_up(waited_seconds))
        if self._is_live(rank):
            return self._streams[rank]
        if self._doorway.has(rank):
            connection = self._doorway.arrived.pop(rank)
            return self._make(rank, connection, _name_of_peer(connection))
        if lost := self._lost():
            return StreamError(rank, "", "; ".join(f"rank {gone} is gone ({how})" for gone, how in lost.items()))
        refused = f"; last refused connection: {self._doorway.refused}" if self._doorway.refused else ""
        return StreamError(rank, "", _SILENT.format(waited_seconds) + refused)

    def _make(self, rank: int, connection: socket.socket, address: str) -> Stream:
        made = Stream(
            connection,
            rank,
            address,
            timeout_seconds=self._timeout_seconds,
            peer_timeout_seconds=self._options.peer_timeout_seconds,
        )
        if rank in self._streams:
            self._replaced.append(self._streams[rank])
        self._streams[rank] = made
        if self._dispatcher is not None:
            self._dispatcher.add(made)
        return made

    def drop(self) -> None:
        """Close all descriptors without notifying other ranks: for a forked child."""
        self._closed = True
        if self._dispatcher is not None:
            self._dispatcher.drop()
        self._doorway.close()
        for stream in (*self._streams.values(), *self._replaced):
            stream.connection.close()


def _open_local_door() -> tuple[list[socket.socket], str]:
    name = f"dcp-streams-{secrets.token_hex(16)}"
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # not Linux, or a sandbox
        door = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        door.bind(f"\0{name}")
        door.listen(_BACKLOG)
        door.setblocking(False)
        stack.pop_all()
        return [door], name
    return [], ""


def _name_of_peer(connection: socket.socket) -> str:
    if is_local(connection):
        return "its Unix socket"
    with contextlib.suppress(OSError):
        return str(connection.getpeername()[0])
    return ""


_alive: weakref.WeakSet[Streams] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close connections, which would make the parent look alive."""
    for streams in list(_alive):
        streams.drop()


os.register_at_fork(after_in_child=_close_in_child)
