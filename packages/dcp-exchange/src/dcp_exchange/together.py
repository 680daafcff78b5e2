"""`read_together`: the ranks of a load read each stored byte once, and pass it on to the other ranks that want it.

The phases: what each rank wants, who is of one host, who reads what, the reading. If ranks cannot connect to each
other, each reads for itself, as without this package.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_core import Exchanged, PreparedRead
from dcp_core.toolkit import library_logger
from dcp_exchange.arena import Arena
from dcp_exchange.assignment.assign import assign
from dcp_exchange.errors import ExchangeError, ExchangeInterruptedError
from dcp_exchange.holders import Unreadable, by_what_they_hold, name_in, pack_held, unpack_holders
from dcp_exchange.piece_queue import PieceQueue, helped
from dcp_exchange.piece_reader import PieceReader
from dcp_exchange.roles import Plan, Roles
from dcp_exchange.topology import Topology
from dcp_exchange.transfer import Transfer
from dcp_hooks import find_progress
from dcp_io import CheckpointReplacedError, Delivery, Demands, ReadRequest, ReadStats
from dcp_ranks import Coordinator, PeerOptions, StreamCard, StreamError, Streams, group_by_host, job_secret

__all__ = ["read_together"]

_log = library_logger(__name__)

_CONNECT_SECONDS = 15.0
_ARENA_BYTES = 64 << 20
_LARGEST_PIECE_BYTES = 4 << 20
# One slot that is being filled, and others that are being taken: each more is memory whose pages must be made first.
_SLOTS_PER_THREAD = 2
_PAGE_BYTES = 4096
_GAP_BYTES = 16 << 10
_NOTHING_SHARED = "no two ranks want the same bytes"


def read_together(
    coordinator: Coordinator,
    prepare: Callable[[], PreparedRead],
    *,
    timeout_seconds: float,
    peers: PeerOptions | None = None,
) -> Exchanged:
    """Read and deliver the requests of all ranks, each stored byte once; see `dcp_core.Exchange`.

    Guarantees: every byte with a CRC is checked before it is delivered, by the rank that has read it, and again on each
    other host to which it is sent. Memory beyond the destinations stays below 64 MiB per rank, unless a single block of
    the checkpoint that is checked as a whole is larger. If one rank fails, all raise. If ranks cannot connect to each
    other, each reads for itself. Where each host has objects of its own (`Store.place` is `host`), a host reads what
    it has; if a copy is missing or cannot be read, all is read again with the copy of another host.

    Args:
        coordinator: Coordinator of the load.
        prepare: Function that returns this rank's requests; called within a phase, and again for each further attempt.
        timeout_seconds: Time without news from other ranks after which this rank gives up.
        peers: Options for connections between ranks; None for the defaults.

    Raises:
        CheckpointException: A rank failed; raised on all ranks.
        ExchangeError: The connection of two ranks was lost, although both live; raised on all ranks.

    Ranks: every rank; collective.
    """
    run = _Exchange(coordinator, prepare, timeout_seconds, peers)
    done: Exchanged | None = None
    while done is None:  # again for each copy of an object that cannot be read, as long as another host has one
        secret = run.agree_on_demands()
        with contextlib.ExitStack() as stack:
            obstacle = run.connect(stack, secret)
            if obstacle is None:
                done = run.read(stack)
        if obstacle is not None:
            if obstacle != _NOTHING_SHARED and coordinator.is_coordinator:
                _log.warning("each rank reads for itself, although the ranks were to read together: %s", obstacle)
            done = run.read_alone(obstacle)
    return done


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What one rank reads."""

    read: PreparedRead
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class _Card:
    """What one rank sends to the coordinator before ranks connect."""

    card: StreamCard | str
    """How to connect to it, or the reason why it cannot connect."""
    demands: Demands | None
    apart: bool
    """Whether each host has objects of its own."""


class _Exchange:
    """One exchange on one rank, phase by phase. Arguments: see `read_together`."""

    def __init__(
        self,
        coordinator: Coordinator,
        prepare: Callable[[], PreparedRead],
        timeout_seconds: float,
        peers: PeerOptions | None,
    ) -> None:
        self._coordinator = coordinator
        self._prepare = prepare
        self._timeout_seconds = timeout_seconds
        self._peers = peers
        self._prepared: _Prepared | None = None
        self._groups: list[list[int]] = []
        """On the coordinator: ranks with equal demands."""
        self._demands: list[Demands] = []
        """On the coordinator: the demands of each group."""
        self._sends = False
        self._streams: Streams | None = None
        self._plan: Plan | None = None
        self._names: list[str] | None = None
        """Names of the objects that the ranks want, if each host has objects of its own."""
        self._bad: dict[tuple[str, int], str] = {}
        """Object and lowest rank of a host whose copy cannot be read → the error, as text."""

    @property
    def prepared(self) -> _Prepared:
        """What this rank reads."""
        if self._prepared is None:
            raise ExchangeError("the exchange was not prepared")
        return self._prepared

    def agree_on_demands(self) -> bytes:
        """Find out which ranks want the same; returns the secret of the job."""

        def digest() -> bytes:
            read = self._prepare()
            self._prepared = _Prepared(read, read.backend.start_delivery(read.requests, find_progress()))
            return self.prepared.delivery.demands.digest()

        def group(digests: list[bytes]) -> list[tuple[bytes, bool]]:
            ranks: defaultdict[bytes, list[int]] = defaultdict(list)
            for rank, each in enumerate(digests):
                ranks[each].append(rank)
            self._groups = [*ranks.values()]
            drawn, first = secrets.token_bytes(32), {group[0] for group in self._groups}
            return [(drawn, rank in first) for rank in range(len(digests))]

        drawn, self._sends = self._coordinator.reduce_scatter("demands", digest, group)
        return drawn

    def connect(self, stack: contextlib.ExitStack, secret: bytes) -> str | None:
        """Connect the ranks, and plan; returns None, or the reason why each rank must read for itself."""
        cards, self._names, obstacle = self._coordinator.all_reduce(
            "cards", lambda: self._open_streams(stack, secret), self._keep_demands
        )
        if obstacle is not None:
            return obstacle
        streams = self._made
        streams.meet(cards)
        mine = cards[self._coordinator.rank]
        near = [card.rank for card in cards if card.host == mine.host and card.rank != mine.rank]

        def find_neighbours() -> tuple[list[int], bytes | None]:
            made = streams.connect_many(near, min(self._timeout_seconds, _CONNECT_SECONDS))
            found = [rank for rank, stream in made.items() if not isinstance(stream, StreamError) and stream.same_host]
            return found, self._held()

        found = self._plan = self._coordinator.all_reduce("hosts", find_neighbours, self._make_plan)
        if not len(found.assignment.starts):
            return _NOTHING_SHARED
        if len(found.topology.members) == 1:
            return None
        failed = [text for text in self._coordinator.all_gather("connections", self._connect_hosts) if text]
        return failed[0] if failed else None

    def read(self, stack: contextlib.ExitStack) -> Exchanged | None:
        """Read together; returns None if copies could not be read that other hosts have, too."""
        plan, delivery = self._planned, self.prepared.delivery
        take = self._coordinator.tickets(self._coordinator.world_size)
        alone = delivery.left_alone(_ranges(plan))
        progress = find_progress()
        progress.expect(delivery.missing_bytes)
        reader = PieceReader(self.prepared.read.backend, delivery)
        rank = self._coordinator.rank
        near_only = plan.holders is not None
        helping = helped(rank, plan.topology.members, near_only=near_only)
        queue = PieceQueue(plan.assignment.owners.tolist(), rank, take, helping)

        def read() -> ReadStats | Unreadable | ExchangeInterruptedError:
            backend = self.prepared.read.backend
            most_own = min(queue.own + 1, _SLOTS_PER_THREAD * backend.threads)
            arena = _make_arena(plan, Roles(plan, rank), most_own, backend.max_inflight_bytes)
            transfer = Transfer(
                plan,
                rank,
                delivery=delivery,
                reader=reader,
                queue=queue,
                streams=self._made,
                threads=backend.threads,
                arena=arena,
                timeout_seconds=self._timeout_seconds,
            )
            stack.callback(transfer.close)
            return self._run(transfer, alone, reader)

        results = self._coordinator.all_gather("read", read)
        if self._leave_out(results):
            return None
        mine = results[rank]
        stopped = [result for result in results if isinstance(result, ExchangeInterruptedError)]
        if any(result.replaced for result in stopped):
            return Exchanged(ReadStats(reader.bytes_read), replaced=True)
        if not isinstance(mine, ReadStats) or stopped:
            raise ExchangeError(
                f"the ranks could not read together: {stopped[0]}; load again, or with cooperative=False"
            )
        return Exchanged(mine)

    def _run(
        self, transfer: Transfer, alone: Sequence[ReadRequest], reader: PieceReader
    ) -> ReadStats | Unreadable | ExchangeInterruptedError:
        backend, delivery = self.prepared.read.backend, self.prepared.delivery
        own = ReadStats(0)
        try:
            try:
                transfer.start()
                if alone:
                    own = backend.read_more(alone)
                transfer.wait()
                delivery.finish()
            except ExchangeInterruptedError:
                raise
            except BaseException as error:  # noqa: BLE001 - `wait` raises it
                lost = isinstance(error, StreamError)
                transfer.fail(ExchangeInterruptedError(str(error)) if lost else error)
                transfer.wait()  # another rank's error may have come first
        except ExchangeInterruptedError as error:  # not itself: its traceback leads to the memory of the exchange
            return ExchangeInterruptedError(str(error), replaced=error.replaced)
        except CheckpointReplacedError as error:
            return ExchangeInterruptedError(str(error), replaced=True)
        except Exception as error:
            if (bad := self._look_into(error, transfer.origin)) is None:
                raise
            return bad
        return ReadStats(
            own.bytes_read + reader.bytes_read, own.unverified_keys | delivery.unverified, transfer.bytes_received
        )

    def read_alone(self, reason: str) -> Exchanged | None:
        """Read for this rank alone, as without an exchange; returns None as `read` does."""
        prepared = self.prepared.read

        def read() -> ReadStats | Unreadable | None:
            try:
                return prepared.backend.read(prepared.requests)
            except CheckpointReplacedError:
                return None
            except Exception as error:
                # Where ranks cannot connect, no host reads for another one.
                bad = self._look_into(error, self._own_host) if reason == _NOTHING_SHARED else None
                if bad is None:
                    raise
                return bad

        results = self._coordinator.all_gather("read", read)
        if self._leave_out(results):
            return None
        mine = results[self._coordinator.rank]
        if not isinstance(mine, ReadStats) or any(result is None for result in results):
            return Exchanged(mine if isinstance(mine, ReadStats) else ReadStats(0), alone=reason, replaced=True)
        return Exchanged(mine, alone=reason)

    def _look_into(self, error: Exception, host: int) -> Unreadable | None:
        """Return the copy that an error is about, if another host has one, too; None if the error is to be raised."""
        holders = None if self._plan is None else self._plan.holders
        name = None if holders is None else name_in(error, holders)
        if holders is not None and name is not None and {*holders[name]} - {host}:
            return Unreadable(name, host, str(error))
        self.prepared.read.note_changes(error)
        return None

    def _leave_out(self, results: Sequence[object]) -> bool:
        """Leave copies that could not be read out of the next attempt; returns whether there were any."""
        found = [result for result in results if isinstance(result, Unreadable)]
        for each in found:
            lowest = self._planned.topology.members[each.host][0]
            self._bad[each.name, lowest] = each.error
            if self._coordinator.is_coordinator:
                _log.warning("the copy on the host of rank %d is left for another one: %s", lowest, each.error)
        return bool(found)

    def _held(self) -> bytes | None:
        """Return which of the wanted objects this rank can read; None if every rank can read all."""
        store = self.prepared.read.backend.store
        return None if self._names is None else pack_held(store, self._names)

    @property
    def _planned(self) -> Plan:
        if self._plan is None:
            raise ExchangeError("the exchange was not planned")
        return self._plan

    @property
    def _own_host(self) -> int:
        return self._planned.topology.hosts[self._coordinator.rank]

    @property
    def _made(self) -> Streams:
        if self._streams is None:
            raise ExchangeError("the streams of the exchange are not open")
        return self._streams

    def _open_streams(self, stack: contextlib.ExitStack, secret: bytes) -> _Card:
        apart = self.prepared.read.backend.store.place == "host"
        demands = self.prepared.delivery.demands if self._sends else None
        try:
            Arena(_PAGE_BYTES, [1]).close()  # a sandbox may allow no shared memory
            made = Streams(
                self._coordinator.rank,
                job_secret(secret),
                options=self._peers,
                store=self._coordinator.store,
                timeout_seconds=self._timeout_seconds,
                lost=self._coordinator.lost_ranks,
            )
        except OSError as error:
            return _Card(f"rank {self._coordinator.rank}: {error}", demands, apart)
        self._streams = stack.enter_context(made)
        return _Card(made.card, demands, apart)

    def _keep_demands(self, sent: list[_Card]) -> tuple[list[StreamCard], list[str] | None, str | None]:
        self._demands = [each.demands for each in sent if each.demands is not None]
        names = {name for demands in self._demands for name in demands.names}
        cards = [each.card for each in sent if isinstance(each.card, StreamCard)]
        obstacle = next((each.card for each in sent if isinstance(each.card, str)), None)
        return cards, sorted(names) if any(each.apart for each in sent) else None, obstacle

    def _make_plan(self, told: list[tuple[list[int], bytes | None]]) -> Plan:
        """On the coordinator: decide who reads what."""
        neighbours, held = [found for found, _ in told], [bits for _, bits in told]
        hosts = group_by_host(dict(enumerate(neighbours)))
        if self._names is not None:
            hosts = by_what_they_hold(hosts, held)
        host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
        numbers = [host_of[rank] for rank in range(len(neighbours))]
        store = self.prepared.read.backend.store
        gap_bytes = _GAP_BYTES if store.read_gap_bytes is None else store.read_gap_bytes
        groups = list(zip(self._demands, self._groups, strict=True))
        holders = None
        if self._names is not None:
            holders = unpack_holders(self._names, held, hosts, self._bad)
        made = assign(groups, numbers, holders=holders, gap_bytes=gap_bytes, largest_piece_bytes=_LARGEST_PIECE_BYTES)
        return Plan(made, Topology.of(numbers), holders)

    def _connect_hosts(self) -> str:
        """Connect to the ranks of other hosts that this rank needs; returns what went wrong, or an empty text."""
        distant = Roles(self._planned, self._coordinator.rank).distant
        made = self._made.connect_many([*distant.values()], min(self._timeout_seconds, _CONNECT_SECONDS))
        return next((str(found) for found in made.values() if isinstance(found, StreamError)), "")


def _ranges(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """Return the shared ranges of each file."""
    found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    pieces = plan.assignment
    columns = (pieces.objects, pieces.starts, pieces.stops)
    for number, start, stop in zip(*(column.tolist() for column in columns), strict=True):
        found[pieces.names[number]].append((start, stop))
    return found


def _make_arena(plan: Plan, roles: Roles, most_own: int, most_bytes: int) -> Arena:
    sizes = plan.assignment.stops - plan.assignment.starts
    slot_bytes = -(-int(np.max(sizes)) // _PAGE_BYTES) * _PAGE_BYTES
    most = max(2, min(_ARENA_BYTES, most_bytes) // slot_bytes)
    own = min(most // 2 if roles.lanes else most, most_own)
    incoming = [max(1, most // 2 // max(1, roles.lanes))] * roles.lanes
    return Arena(slot_bytes, [max(1, own), *incoming])
