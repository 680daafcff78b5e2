"""Links between hosts, and the ways of bytes over them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_exchange import Topology

README = Path(__file__).parents[1] / "README.md"


def job(hosts: int, ranks: int) -> Topology:
    return Topology.of([rank // ranks for rank in range(hosts * ranks)])


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
    most = max(topology.count_sockets(rank) for rank in range(ranks))  # all hosts are alike
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
        assert most == max(topology.count_sockets(rank) for rank in range(hosts * ranks))
        assert limit == 2 * (hosts - 1).bit_length() + 16
        assert steps == max(reached(topology.tree(0, range(hosts)), 0).values())
