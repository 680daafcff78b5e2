"""Links between hosts; and what each rank does with a piece, played through with messages as in a job."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_exchange import topology as topology_module
from dcp_exchange.assignment.assign import Assignment
from dcp_exchange.topology import Plan, Roles, Topology

README = Path(__file__).parents[1] / "README.md"


def job(hosts: int, ranks: int) -> Topology:
    return Topology.of([rank // ranks for rank in range(hosts * ranks)])


def count_sockets(topology: Topology, rank: int) -> int:
    return len(topology.members[topology.hosts[rank]]) - 1 + len(topology.links(rank))


@st.composite
def sent(draw: st.DrawFn) -> tuple[Topology, int, set[int]]:
    count = draw(st.integers(1, 140))
    host = st.integers(0, count - 1)
    receivers = draw(st.sets(host) | st.just({*range(count)}))
    return job(count, draw(st.sampled_from([1, 2, 8]))), draw(host), receivers


def reached(tree: dict[int, tuple[int, ...]], source: int) -> dict[int, int]:
    """Each host that is reached → number of steps."""
    found, waiting = {source: 0}, [source]
    for host in waiting:
        for following in tree.get(host, ()):
            assert following not in found, f"host {following} is reached twice"
            found[following] = found[host] + 1
            waiting.append(following)
    assert tree.keys() <= found.keys()
    return found


@given(sent())
def test_every_receiving_host_is_reached_once_over_links(case: tuple[Topology, int, set[int]]) -> None:
    topology, source, receivers = case
    tree = topology.tree(source, receivers)
    found = reached(tree, source)
    assert receivers <= found.keys() | {source}
    assert all({*following} <= {*topology.neighbours(host)} for host, following in tree.items())
    assert max(found.values()) <= (len(topology.members) - 1).bit_length()
    ends = found.keys() - tree.keys()
    assert ends <= receivers | {source}  # nobody gets it for nothing
    if topology.direct:
        assert found.keys() == receivers | {source}


@pytest.mark.parametrize("hosts", [2, 31, 33, 64, 100, 128])
def test_what_all_hosts_want_is_sent_to_each_other_host_once(hosts: int) -> None:
    topology = job(hosts, 1)
    for source in range(hosts):
        assert sum(map(len, topology.tree(source, range(hosts)).values())) == hosts - 1


@settings(max_examples=25)
@given(st.integers(1, 140), st.sampled_from([1, 2, 8]))
def test_both_ends_of_a_link_agree(hosts: int, ranks: int) -> None:
    topology = job(hosts, ranks)
    ends = {(rank, peer) for rank in range(hosts * ranks) for _, peer in topology.links(rank)}
    assert ends == {(peer, rank) for rank, peer in ends}
    for rank in range(hosts * ranks):
        for other, peer in topology.links(rank):
            assert peer in topology.members[other]
            assert other != topology.hosts[rank]
    assert len(ends) == sum(len(topology.neighbours(host)) for host in range(hosts))


@given(st.integers(1, 300), st.integers(1, 16))
def test_no_process_has_many_sockets(hosts: int, ranks: int) -> None:
    topology = job(hosts, ranks)
    most = max(count_sockets(topology, rank) for rank in range(ranks))  # all hosts are alike
    assert most <= 2 * (hosts - 1).bit_length() + 16


@pytest.mark.parametrize("hosts", [2, 5, 16, 27])
def test_hosts_of_small_jobs_are_all_linked(hosts: int) -> None:
    topology = job(hosts, 1)
    assert topology.direct
    assert all(len(topology.neighbours(host)) == hosts - 1 for host in range(hosts))
    assert not job(33, 8).direct
    assert job(32, 8).direct


def test_links_are_spread_over_the_ranks_of_a_host() -> None:
    assert sorted(len(job(9, 4).links(rank)) for rank in range(4)) == [2, 2, 2, 2]
    assert sorted(len(job(64, 8).links(rank)) for rank in range(8)) == [1, 1, 1, 1, 1, 2, 2, 2]


def test_hosts_are_numbered_by_their_lowest_rank() -> None:
    topology = Topology.of([70, 5, 70, 5, 9])
    assert topology.members == ((0, 2), (1, 3), (4,))
    assert topology.hosts == (0, 1, 0, 1, 2)
    assert {topology.keeper(0, 1), topology.keeper(0, 2)} == {0, 2}
    assert topology.keeper(2, 0) == topology.keeper(2, 1) == 4


@pytest.mark.parametrize(("host", "other"), [(0, 0), (0, 3), (5, 62)])
def test_hosts_without_a_link_have_no_keeper(host: int, other: int) -> None:
    with pytest.raises(ValueError, match=f"host {host} of 64 has no link to host {other}"):
        job(64, 1).keeper(host, other)


def test_the_readme_has_the_numbers_of_sockets() -> None:
    rows = re.findall(r"^\| (\d+) × (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", README.read_text(), re.MULTILINE)
    assert len(rows) >= 4
    for row in rows:
        hosts, ranks, most, limit, steps = map(int, row)
        topology = job(hosts, ranks)
        assert most == max(count_sockets(topology, rank) for rank in range(hosts * ranks))
        assert limit == 2 * (hosts - 1).bit_length() + 16
        assert steps == max(reached(topology.tree(0, range(hosts)), 0).values())


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
    with pytest.MonkeyPatch.context() as patch:
        if not direct:
            patch.setattr(topology_module, "MOST_LINKED_HOSTS", 1)
        plan = Plan(job.assignment(), Topology.of(job.hosts))
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
        receiving = [{job.hosts[rank] for rank in job.classes[of_class]} for _, of_class in job.pieces]
        assert sent == sum(
            len(hosts - {job.hosts[owner]}) for hosts, (owner, _) in zip(receiving, job.pieces, strict=True)
        )


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
