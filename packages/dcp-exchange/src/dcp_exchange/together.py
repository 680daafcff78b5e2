"""`read_together`: a cooperative load in the phases demands, hosts, plan and reading."""

from __future__ import annotations

import contextlib
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_base import DcpError
from dcp_base.logs import library_logger
from dcp_base.progress import find_progress
from dcp_core.storage.storage_reader import Exchanged, PreparedRead
from dcp_exchange.arena import Arena
from dcp_exchange.assignment.assign import assign
from dcp_exchange.errors import ExchangeError, ExchangeInterruptedError, is_lack
from dcp_exchange.holders import Unreadable, by_what_they_hold, name_in, pack_held, unpack_holders
from dcp_exchange.piece_queue import PieceQueue, PieceReader, helped
from dcp_exchange.topology import Plan, Roles, Topology
from dcp_exchange.transfer import Transfer, stop_others
from dcp_io import CheckpointReplacedError, HostStore, ReadRequest
from dcp_io.reading.crc_checks import Demands
from dcp_io.reading.delivery import Delivery
from dcp_io.reading.read_plan import ReadSizes
from dcp_io.requests import ReadStats
from dcp_ranks import Coordinator, PeerOptions, StreamCard, StreamError, Streams, group_by_host, job_secret

_log = library_logger(__name__)

_ARENA_BYTES = 64 << 20
_LARGEST_PIECE_BYTES = 4 << 20
# One slot that is being filled, and others that are being taken: each more is memory whose pages must be made first.
_SLOTS_PER_THREAD = 2
_PAGE_BYTES = 4096
_SHOWN_REASONS = 3
_NOTHING_SHARED = "no two ranks want the same bytes"


def read_together(
    coordinator: Coordinator,
    prepare: Callable[[], PreparedRead],
    *,
    timeout_seconds: float,
    peers: PeerOptions | None = None,
) -> Exchanged:
    """Read and deliver the requests of all ranks, each stored byte once; see `Exchange`.

    The reading rank checks every byte with a CRC before delivery, and each receiving host checks it again. A rank needs
    less than 64 MiB beyond the destinations, unless a larger block is checked as a whole.

    If ranks cannot connect, lose a connection, or lack memory, descriptors or threads, each reads for itself. Hosts
    with their own objects (a `dcp_io.HostStore`) read these; after a missing or unreadable copy, all ranks call
    `prepare` again and read another host's copy. `timeout_seconds` is the longest time without messages.

    Raises:
        CheckpointException: A rank failed; raised on all ranks.
        ExchangeError: Hosts have their own objects, and ranks cannot exchange them; raised on all ranks.

    Ranks: every rank; collective.
    """
    run = _Exchange(coordinator, prepare, timeout_seconds, peers)
    done: Exchanged | None = None
    # Again for each copy of an object that cannot be read, as long as another host has one, and if a rank lacked
    # something on the way.
    while done is None:
        secret = run.agree_on_demands()
        obstacle: str | Exchanged | None = run.obstacle
        if obstacle is None:
            with contextlib.ExitStack() as stack:
                obstacle = run.connect(stack, secret)
                if obstacle is None:
                    done = run.read(stack)
        if isinstance(obstacle, Exchanged):
            return obstacle
        if obstacle is not None:
            if obstacle != _NOTHING_SHARED and coordinator.is_coordinator:
                _log.warning("each rank reads for itself, although the ranks were to read together: %s", obstacle)
            done = run.read_alone(obstacle)
    return done


@dataclass(frozen=True, slots=True)
class _Card:
    card: StreamCard | str
    """How to connect to the rank, or why it cannot connect."""
    demands: Demands | None
    apart: bool


class _Exchange:
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
        self._wanted: PreparedRead
        self._delivery: Delivery
        self._groups: list[list[int]]
        self._demands: list[Demands]
        self._sends = False
        self._streams: Streams
        self._plan: Plan
        self._names: list[str] | None = None
        """Names of the wanted objects, if each host has its own."""
        self.obstacle: str | None = None
        """Why each rank must read for itself; the same on all ranks."""
        self._bad: dict[tuple[str, int], str] = {}
        """(Object, lowest rank of a host) whose copy cannot be read → the error."""

    def agree_on_demands(self) -> bytes:

        def digest() -> bytes:
            self._wanted = self._prepare()
            self._delivery = self._wanted.backend.start_delivery(self._wanted.requests, find_progress())
            return self._delivery.demands.digest()

        def group(digests: list[bytes]) -> list[tuple[bytes, bool]]:
            ranks: defaultdict[bytes, list[int]] = defaultdict(list)
            for rank, each in enumerate(digests):
                ranks[each].append(rank)
            self._groups = [*ranks.values()]
            drawn, first = secrets.token_bytes(32), {group[0] for group in self._groups}
            return [(drawn, rank in first) for rank in range(len(digests))]

        drawn, self._sends = self._coordinator.reduce_scatter("demands", digest, group)
        return drawn

    def connect(self, stack: contextlib.ExitStack, secret: bytes) -> str | Exchanged | None:
        cards, self._names, obstacle = self._coordinator.all_reduce(
            "cards", lambda: self._open_streams(stack, secret), self._keep_demands
        )
        if obstacle is not None:
            return obstacle
        self._streams.meet(cards)
        mine = cards[self._coordinator.rank]
        near = [card.rank for card in cards if card.host == mine.host and card.rank != mine.rank]

        def find_neighbours() -> tuple[list[int], bytes | None] | str:
            try:
                made = self._streams.connect_many(near)
            except (OSError, MemoryError) as error:
                return f"rank {self._coordinator.rank}: {error}"
            found = [rank for rank, stream in made.items() if not isinstance(stream, StreamError) and stream.same_host]
            return found, self._held()

        found = self._coordinator.all_reduce("hosts", find_neighbours, self._make_plan)
        if isinstance(found, DcpError):
            return self._lack(found)
        if isinstance(found, str):
            return found
        self._plan = found
        if not len(found.assignment.starts):
            return _NOTHING_SHARED
        if len(found.topology.members) == 1:
            return None
        failed = [text for text in self._coordinator.all_gather("connections", self._connect_hosts) if text]
        return failed[0] if failed else None

    def _lack(self, error: DcpError) -> Exchanged:
        """Return whether the checkpoint was replaced; otherwise raise the error on all ranks."""

        def is_replaced() -> bool:
            return self._wanted.backend.replaced_by() is not None

        def conclude(replaced: list[bool]) -> None:
            if not any(replaced):
                raise error

        self._coordinator.all_reduce("replaced", is_replaced, conclude)
        return Exchanged(ReadStats(0), replaced=True)

    def read(self, stack: contextlib.ExitStack) -> Exchanged | None:
        """Read together; return None to begin again: another host has unreadable copies, or `obstacle` is set."""
        plan, delivery, backend = self._plan, self._delivery, self._wanted.backend
        take = self._coordinator.tickets(self._coordinator.world_size)
        alone = delivery.left_alone(_ranges(plan))
        progress = find_progress()
        progress.expect(delivery.missing_bytes)
        reader = PieceReader(backend, delivery)
        rank = self._coordinator.rank
        near_only = plan.holders is not None
        helping = helped(rank, plan.topology.members, near_only=near_only)
        queue = PieceQueue(plan.assignment.owners.tolist(), rank, take, helping)

        def read() -> ReadStats | Unreadable | ExchangeInterruptedError:
            most_own = min(queue.own + 1, _SLOTS_PER_THREAD * backend.threads)
            try:
                arena = _make_arena(plan, Roles(plan, rank), most_own, backend.max_inflight_bytes)
                stack.callback(arena.close)
                transfer = Transfer(
                    plan,
                    rank,
                    delivery=delivery,
                    reader=reader,
                    queue=queue,
                    streams=self._streams,
                    threads=backend.threads,
                    arena=arena,
                    timeout_seconds=self._timeout_seconds,
                )
            except Exception as error:
                if not is_lack(error):
                    raise
                stop_others(self._streams.made, error)
                return self._stop_for(error)
            stack.callback(transfer.close)
            return self._run(transfer, alone, reader)

        return self._conclude(self._coordinator.all_gather("read", read), reader)

    def _conclude(
        self, results: list[ReadStats | Unreadable | ExchangeInterruptedError], reader: PieceReader
    ) -> Exchanged | None:
        """Return the result from the results of all ranks; None to begin again."""
        if self._leave_out(results):
            return None
        mine = results[self._coordinator.rank]
        stopped = [result for result in results if isinstance(result, ExchangeInterruptedError)]
        if any(result.replaced for result in stopped):
            return Exchanged(ReadStats(reader.bytes_read), replaced=True)
        if isinstance(mine, ReadStats) and not stopped:
            return Exchanged(mine)
        # No rank has failed, or the phase would have: one lacks something, or two have lost their connection.
        lost = [*dict.fromkeys(map(str, stopped))][:_SHOWN_REASONS]
        reason = next((str(result) for result in stopped if result.is_lack), "; ".join(lost))
        if self._plan.holders is not None:  # no rank can read what other hosts have
            raise ExchangeError(f"the ranks could not read together: {reason}; load again, or with cooperative=False")
        self.obstacle = reason
        return None

    def _stop_for(self, error: Exception) -> ExchangeInterruptedError:
        return ExchangeInterruptedError(f"rank {self._coordinator.rank}: {error}", is_lack=True)

    def _run(
        self, transfer: Transfer, alone: Sequence[ReadRequest], reader: PieceReader
    ) -> ReadStats | Unreadable | ExchangeInterruptedError:
        backend, delivery = self._wanted.backend, self._delivery
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
                transfer.fail(error)
                transfer.wait()  # another rank's error may have come first
        except ExchangeInterruptedError as error:  # not itself: its traceback leads to the memory of the exchange
            return ExchangeInterruptedError(str(error), replaced=error.replaced)
        except CheckpointReplacedError as error:
            return ExchangeInterruptedError(str(error), replaced=True)
        except Exception as error:
            if is_lack(error):
                return self._stop_for(error)
            if (bad := self._look_into(error, transfer.origin)) is None:
                raise
            return bad
        return ReadStats(
            own.bytes_read + reader.bytes_read, own.unverified_keys | delivery.unverified, transfer.bytes_received
        )

    def read_alone(self, reason: str) -> Exchanged | None:
        wanted = self._wanted

        def read() -> ReadStats | Unreadable | None:
            try:
                return wanted.backend.read(wanted.requests)
            except CheckpointReplacedError:
                return None
            except Exception as error:
                # Where ranks cannot connect, no host reads for another one.
                host = self._plan.topology.hosts[self._coordinator.rank] if reason == _NOTHING_SHARED else None
                bad = None if host is None else self._look_into(error, host)
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
        """Return the copy that an error is about if another host has one; None if the error must be raised."""
        holders = self._plan.holders
        name = None if holders is None else name_in(error, holders)
        if holders is not None and name is not None and {*holders[name]} - {host}:
            return Unreadable(name, host, str(error))
        self._wanted.note_changes(error)
        return None

    def _leave_out(self, results: Sequence[object]) -> bool:
        """Skip unreadable copies in the next attempt; return whether there were any."""
        found = [result for result in results if isinstance(result, Unreadable)]
        for each in found:
            lowest = self._plan.topology.members[each.host][0]
            self._bad[each.name, lowest] = each.error
            if self._coordinator.is_coordinator:
                _log.warning("the copy on the host of rank %d is left for another one: %s", lowest, each.error)
        return bool(found)

    def _held(self) -> bytes | None:
        store = self._wanted.backend.store
        if self._names is None or not isinstance(store, HostStore):
            return None
        return pack_held(store, self._names)

    def _open_streams(self, stack: contextlib.ExitStack, secret: bytes) -> _Card:
        apart = isinstance(self._wanted.backend.store, HostStore)
        demands = self._delivery.demands if self._sends else None
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
        except (OSError, MemoryError) as error:
            return _Card(f"rank {self._coordinator.rank}: {error}", demands, apart)
        self._streams = stack.enter_context(made)
        return _Card(made.card, demands, apart)

    def _keep_demands(self, sent: list[_Card]) -> tuple[list[StreamCard], list[str] | None, str | None]:
        self._demands = [each.demands for each in sent if each.demands is not None]
        names = {name for demands in self._demands for name in demands.names}
        cards = [each.card for each in sent if isinstance(each.card, StreamCard)]
        obstacle = next((each.card for each in sent if isinstance(each.card, str)), None)
        return cards, sorted(names) if any(each.apart for each in sent) else None, obstacle

    def _make_plan(self, told: list[tuple[list[int], bytes | None] | str]) -> Plan | DcpError | str:
        """Plan, on the coordinator; return an error if an object exists nowhere, or a reason not to read together."""
        met = [each for each in told if not isinstance(each, str)]
        if len(met) < len(told):
            return next(each for each in told if isinstance(each, str))
        neighbours, held = [found for found, _ in met], [bits for _, bits in met]
        hosts = group_by_host(dict(enumerate(neighbours)))
        if self._names is not None:
            hosts = by_what_they_hold(hosts, held)
        host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
        numbers = [host_of[rank] for rank in range(len(neighbours))]
        gap_bytes = ReadSizes.of(self._wanted.backend.store).gap_bytes
        groups = list(zip(self._demands, self._groups, strict=True))
        holders = None
        if self._names is not None:
            try:
                holders = unpack_holders(self._names, held, hosts, self._bad)
            except DcpError as error:
                return error
        made = assign(groups, numbers, holders=holders, gap_bytes=gap_bytes, largest_piece_bytes=_LARGEST_PIECE_BYTES)
        return Plan(made, Topology.of(numbers), holders)

    def _connect_hosts(self) -> str:
        """Connect to the needed ranks of other hosts; return a problem, or an empty text."""
        distant = Roles(self._plan, self._coordinator.rank).distant
        try:
            made = self._streams.connect_many([*distant.values()])
        except (OSError, MemoryError) as error:
            return f"rank {self._coordinator.rank}: {error}"
        return next((str(found) for found in made.values() if isinstance(found, StreamError)), "")


def _ranges(plan: Plan) -> dict[str, list[tuple[int, int]]]:
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
