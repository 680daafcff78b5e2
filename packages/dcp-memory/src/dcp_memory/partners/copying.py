"""Copies of the hosts' parts of a checkpoint on their partners: the phases."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_base import DcpError
from dcp_base.progress import Progress, report_operation
from dcp_io.roots.copy_notes import CopyNote, CopyRequest, HostsCopied, JobHosts
from dcp_io.timed_call import Pace
from dcp_manifest import CheckpointIndex, read_index
from dcp_manifest.folders.folder import METADATA_NAME
from dcp_manifest.index.columns import needed_bytes
from dcp_memory.partners.courier import MOST_FILES, Courier, Offer
from dcp_ranks import Coordinator, PeerOptions, Stream, StreamCard, StreamError, Streams, group_by_host, job_secret

_POLL_SECONDS = 2.0
_NICE = 10


class _NotProtectedError(Exception):
    """The copy failed, for a reason that all ranks know."""


@dataclass(frozen=True, slots=True)
class _Found:
    problem: str | None
    save_id: str = ""
    host: str = ""
    needed: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    """Those that the host has, without copies of others."""


@dataclass(frozen=True, slots=True)
class _Part:
    index: CheckpointIndex
    offer: Offer


def copy_to_partners(coordinator: Coordinator, request: CopyRequest, *, rate: float | None = None) -> HostsCopied:
    """Copy the part of a checkpoint that each host has written to its partner host; see `HostCopies`.

    Guarantees: a copy has its full size only after its bytes have passed all CRCs. The checkpoint is noted as protected
    only after all hosts' parts are with their partners, durably. If a rank fails, all raise CheckpointException.

    Ranks: every rank; collective.
    """
    _lower_priority()
    run = _Copy(coordinator, request, rate)
    try:
        if run.leads:
            with report_operation("protect", request.store.url) as progress:
                run.carry_out(progress)
        else:
            run.carry_out(Progress(None))
    except _NotProtectedError as error:
        return HostsCopied(str(error), run.bytes_sent)
    return HostsCopied(None, run.bytes_sent)


class _Copy:
    def __init__(self, coordinator: Coordinator, request: CopyRequest, rate: float | None) -> None:
        self._coordinator = coordinator
        self._request = request
        self._rate = rate
        self._peers = request.peers or PeerOptions()
        self.leads = request.leaders[coordinator.rank] == coordinator.rank
        self._part: _Part | None = None
        self._streams: Streams | None = None
        self._courier: Courier | None = None

    @property
    def bytes_sent(self) -> int:
        return 0 if self._courier is None else self._courier.bytes_sent

    def carry_out(self, progress: Progress) -> None:
        secret, hosts, reason = self._coordinator.all_reduce("parts", self._look, _agree)
        if reason is not None:
            raise _NotProtectedError(reason)
        with contextlib.ExitStack() as stack:
            cards = self._coordinator.all_gather("cards", lambda: self._open_streams(stack, secret))
            partners = self._coordinator.all_reduce(
                "machines", lambda: self._find_neighbours(cards), lambda found: _choose(found, self._request.leaders)
            )
            if not partners:
                raise _NotProtectedError("all hosts' stores are on one machine")
            states = self._coordinator.all_gather("connections", lambda: self._connect(stack, partners, progress))
            while not _is_over(states):
                states = self._coordinator.all_gather("copying", self._wait)
            self._end(succeeded=True)
            self._coordinator.all_gather("notes", lambda: self._note(hosts))

    def _look(self) -> _Found | None:
        """Return this host's save, or why none; None on ranks that do not lead."""
        if not self.leads:
            return None
        store = self._request.store
        try:
            index = read_index(store.read(METADATA_NAME), file=METADATA_NAME)
            entries = store.list()
            copies = CopyNote.read(store, entries).names
            sizes = {entry.name: entry.bytes for entry in entries}
            files = needed_bytes(index)
            own = {
                name: sizes[name]
                for name, needed in sorted(files.items())
                if name not in copies and sizes.get(name, -1) >= needed
            }
            if index.info is None:
                return _Found(f"{store.url} has an index of PyTorch")
            if len(own) > MOST_FILES:
                return _Found(f"{store.url} has more than {MOST_FILES} files")
            self._part = _Part(index, Offer(JobHosts(store.parent()).own_id(), index.info.save_id, own))
        except (OSError, DcpError) as error:
            return _Found(self._said(f"{type(error).__name__}: {error}"))
        return _Found(None, self._part.offer.save_id, self._part.offer.host, frozenset(files), frozenset(own))

    def _open_streams(self, stack: contextlib.ExitStack, secret: bytes) -> StreamCard | None:
        if not self.leads:
            return None
        made = Streams(
            self._coordinator.rank,
            job_secret(secret),
            options=self._peers,
            store=self._coordinator.store,
            timeout_seconds=self._peers.peer_timeout_seconds,
            lost=self._coordinator.lost_ranks,
        )
        self._streams = stack.enter_context(made)
        return made.card

    def _find_neighbours(self, cards: Sequence[StreamCard | None]) -> list[int]:
        streams = self._streams
        if streams is None:
            return []
        streams.meet(card for card in cards if card is not None)
        near = [
            card.rank for card in cards if card and card.host == streams.card.host and card.rank != streams.card.rank
        ]
        found = streams.connect_many(near)
        return [rank for rank, stream in found.items() if isinstance(stream, Stream) and stream.same_host]

    def _connect(self, stack: contextlib.ExitStack, partners: dict[int, int], progress: Progress) -> str | None:
        streams, part, rank = self._streams, self._part, self._coordinator.rank
        if streams is None or part is None:
            return None
        others = {partners[rank], *(other for other, partner in partners.items() if partner == rank)}
        made = streams.connect_many(others)
        lost = [found for found in made.values() if isinstance(found, StreamError)]
        if lost:
            return f"rank {rank}: {lost[0]}"
        progress.expect(sum(part.offer.sizes.values()))
        pace = Pace(self._rate)

        def passed(count: int) -> None:
            progress(count)
            pace(count)

        courier = self._courier = Courier(
            self._request.store, part.index, part.offer, passed, self._request.is_cancelled
        )
        stack.callback(self._end, succeeded=False)
        dispatcher = streams.dispatch(courier)
        courier.resume = dispatcher.resume
        dispatcher.start()
        partner = made[partners[rank]]
        courier.start(partner if isinstance(partner, Stream) else None)
        return ""

    def _wait(self) -> str | None:
        """Wait a while; return None if this host's part has arrived, `""` if not yet, or a problem."""
        courier = self._courier
        if courier is None or courier.finished.wait(_POLL_SECONDS):
            return None if courier is None or courier.problem is None else self._said(courier.problem)
        return ""

    def _said(self, problem: str) -> str:
        return f"rank {self._coordinator.rank}: {problem}"

    def _end(self, *, succeeded: bool) -> None:
        courier, streams = self._courier, self._streams
        if courier is None or streams is None:
            return
        if not (succeeded or courier.is_closed):
            for stream in streams.made.values():  # a thread may wait until the partner takes more
                stream.lose("the copy has ended")
        courier.close(succeeded=succeeded)

    def _note(self, hosts: tuple[str, ...]) -> None:
        if self._part is not None:
            store, save_id = self._request.store, self._part.offer.save_id
            note = CopyNote.read(store)
            copies = note.copies if note.save_id == save_id else {}
            CopyNote(save_id, copies, hosts, protected=True).write(store)


def _agree(found: list[_Found | None]) -> tuple[bytes, tuple[str, ...], str | None]:
    """Return a secret, the hosts' ids, and why they cannot copy; coordinator only."""
    parts = [one for one in found if one is not None]
    reason = next((part.problem for part in parts if part.problem is not None), None)
    saves = {part.save_id for part in parts}
    if reason is None and len(saves) > 1:
        reason = f"the hosts have different saves of the step ({', '.join(sorted(saves))})"
    # The store of a host may have lost its files since they were written, and have got the index nevertheless.
    needed, own = (frozenset().union(*names) for names in ([p.needed for p in parts], [p.own for p in parts]))
    if reason is None and needed - own:
        reason = f"no host has {len(needed - own)} of the files that it has written, such as {min(needed - own)}"
    return secrets.token_bytes(32), tuple(part.host for part in parts), reason


def _is_over(states: Sequence[str | None]) -> bool:
    """Return whether all parts are with their partners. Raises _NotProtectedError."""
    if problem := next(filter(None, states), None):
        raise _NotProtectedError(problem)
    return all(state is None for state in states)


def _choose(found: list[list[int]], leaders: Sequence[int]) -> dict[int, int]:
    return partners_of(group_by_host({leader: found[leader] for leader in sorted({*leaders})}))


def _lower_priority() -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def partners_of(machines: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return the partner of each store's leader: the leader of a store on the next machine.

    Stores on one machine (such as of two containers) never back each other up.

    Example:
        ```python
        from dcp_memory.partners.copying import partners_of

        assert partners_of([[0], [2], [4]]) == {0: 2, 2: 4, 4: 0}
        ```
    """
    if len(machines) < 2:
        return {}
    return {
        leader: following[place % len(following)]
        for number, machine in enumerate(machines)
        for following in [machines[(number + 1) % len(machines)]]
        for place, leader in enumerate(machine)
    }
