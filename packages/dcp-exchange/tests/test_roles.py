"""What each rank does with a piece, played through with messages as in a job, without any transport."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_exchange import Assignment, Topology, count_crossing_bytes
from dcp_exchange import topology as topology_module
from dcp_exchange.roles import Plan, Roles


@dataclass(frozen=True)
class Job:
    """Hosts of ranks, the ranks that want each class, and owner and class of each piece."""

    hosts: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]
    pieces: tuple[tuple[int, int], ...]

    def assignment(self) -> Assignment:
        count = len(self.pieces)
        owners, classes = np.array(self.pieces, np.int32).reshape(-1, 2).T
        return Assignment(
            ("file",),
            np.zeros(count, np.int32),
            np.arange(count, dtype=np.int64),
            np.arange(1, count + 1, dtype=np.int64),
            owners,
            classes,
            np.cumsum([0, *map(len, self.classes)], dtype=np.int64),
            np.array([rank for ranks in self.classes for rank in ranks], np.int32),
        )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    hosts = tuple(draw(st.lists(st.integers(0, 9), min_size=2, max_size=24)))
    rank = st.integers(0, len(hosts) - 1)
    some = st.sets(rank, min_size=1) | st.just({*range(len(hosts))})
    classes = tuple(dict.fromkeys(tuple(sorted(ranks)) for ranks in draw(st.lists(some, min_size=1, max_size=5))))
    # The owner is one of those that want the piece, or any other: holders of a piece need not want it.
    piece = st.tuples(rank, st.integers(0, len(classes) - 1))
    return Job(hosts, classes, tuple(draw(st.lists(piece, min_size=1, max_size=8))))


@dataclass
class Played:
    """What has happened to one piece."""

    taken: Counter[int]
    """Rank → times that it took the piece."""
    seen: Counter[int]
    """Rank → times that it had the piece at hand, from a slot of its own or of a neighbour."""
    sent: list[tuple[int, int]]
    """Sender and receiver of each message between hosts."""


def play(roles: list[Roles], owner: int, of_class: int) -> Played:
    """Hand a piece on as `Transfer` does."""
    found = Played(Counter(), Counter(), [])
    origin = roles[owner].host
    arenas = [owner]
    for holder in arenas:
        users = roles[holder].users(of_class, origin)
        assert {*users} <= {*roles[holder].neighbours}
        for rank in (holder, *users):
            found.seen[rank] += 1
            if roles[rank].wants(of_class):
                found.taken[rank] += 1
            for host in roles[rank].onward(of_class, origin):
                receiver = roles[rank].distant[host]  # a KeyError if there is no link
                assert roles[receiver].host == host
                assert roles[receiver].distant[roles[rank].host] == rank, "both ends know of the link"
                assert 0 <= roles[receiver].lane(rank) < roles[receiver].lanes
                found.sent.append((rank, receiver))
                arenas.append(receiver)
    return found


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "indirect"])
@given(job=jobs())
def test_who_wants_a_piece_gets_it_once_and_each_host_gets_it_once(direct: bool, job: Job) -> None:
    assignment = job.assignment()
    with pytest.MonkeyPatch.context() as patch:
        if not direct:
            patch.setattr(topology_module, "MOST_LINKED_HOSTS", 1)
        plan = Plan(assignment, Topology.of(job.hosts))
    assert plan.topology.direct == (direct or len(plan.topology.members) == 1)
    roles = [Roles(plan, rank) for rank in range(len(job.hosts))]
    for owner, of_class in job.pieces:
        wanted = job.classes[of_class]
        played = play(roles, owner, of_class)
        assert played.taken == Counter(wanted)
        assert not [rank for rank, times in played.seen.items() if times > 1]
        arrivals = Counter(roles[receiver].host for _, receiver in played.sent)
        assert not [host for host, times in arrivals.items() if times > 1]
        assert roles[owner].host not in arrivals
        wanting = {roles[rank].host for rank in wanted} - {roles[owner].host}
        assert wanting <= arrivals.keys()
        if direct:
            assert arrivals.keys() == wanting
    if direct:
        sent = sum(len(play(roles, owner, of_class).sent) for owner, of_class in job.pieces)
        assert sent == count_crossing_bytes(assignment, job.hosts)


@given(job=jobs())
def test_a_piece_arrives_on_ever_lower_lanes(job: Job) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology_module, "MOST_LINKED_HOSTS", 1)
        plan = Plan(job.assignment(), Topology.of(job.hosts))
    roles = [Roles(plan, rank) for rank in range(len(job.hosts))]
    for owner, of_class in job.pieces:
        came: dict[int, int] = {}
        for sender, receiver in play(roles, owner, of_class).sent:
            lane = roles[receiver].lane(sender)
            before = came.get(roles[sender].host)
            assert before is None or lane < before, "hosts that wait for room could form a circle"
            came[roles[receiver].host] = lane


def test_ranks_of_one_host_need_no_lanes() -> None:
    job = Job((5, 5, 5), ((0, 2),), ((1, 0),))
    roles = [Roles(Plan(job.assignment(), Topology.of(job.hosts)), rank) for rank in range(3)]
    assert [one.lanes for one in roles] == [0, 0, 0]
    assert [one.neighbours for one in roles] == [[1, 2], [0, 2], [0, 1]]
    assert [one.wants(0) for one in roles] == [True, False, True]
    assert roles[1].users(0, 0) == [0, 2]
