"""Ranks share a host if all of its ranks say so, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_ranks import group_by_host


@pytest.mark.parametrize(
    ("proved", "hosts"),
    [
        ({}, ()),
        ({0: []}, ((0,),)),
        ({0: [1], 1: [0]}, ((0, 1),)),
        ({0: [0, 1], 1: [0, 1]}, ((0, 1),)),  # with itself
        ({0: [1], 1: []}, ((0,), (1,))),  # one of the two does not say so
        ({0: [1], 1: [0, 2], 2: [1]}, ((0, 1), (2,))),  # 0 and 2 have no proof
        ({0: [2], 1: [3], 2: [0], 3: [1]}, ((0, 2), (1, 3))),  # not neighbours
        ({0: [7], 1: []}, ((0,), (1,))),  # a rank that reports nothing
        ({3: [5], 5: [3]}, ((3, 5),)),
    ],
)
def test_hosts(proved, hosts):
    assert group_by_host(proved) == hosts


@given(st.dictionaries(st.integers(0, 9), st.sets(st.integers(0, 9))))
def test_whatever_is_reported_each_rank_is_in_one_group_of_proved_pairs(proved):
    hosts = group_by_host(proved)
    assert sorted(rank for host in hosts for rank in host) == sorted(proved)
    for host in hosts:
        assert list(host) == sorted(host)
        assert all(b in proved[a] for a in host for b in host if a != b)


@given(st.lists(st.integers(0, 3), max_size=12))
def test_complete_proofs_give_the_hosts(host_of):
    proved = {a: [b for b, other in enumerate(host_of) if other == host] for a, host in enumerate(host_of)}
    hosts = {host: [rank for rank, each in enumerate(host_of) if each == host] for host in host_of}
    assert sorted(map(list, group_by_host(proved))) == sorted(hosts.values())
