"""Levelling of bytes over ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_exchange.assignment.kinds import IMPOSSIBLE, level


@pytest.mark.parametrize(
    ("own", "amount", "expected"),
    [
        ([0, 0, 0], 9, [3, 3, 3]),
        ([5, 0, 1], 6, [0, 4, 2]),
        ([5, 0, 1], 0, [0, 0, 0]),
        ([0, 0, 0], 2, [1, 1, 0]),
        ([100, 0, 0], 7, [0, 4, 3]),
        ([3, 2, 1], 9, [2, 3, 4]),
    ],
)
def test_one_kind_raises_the_lowest(own: list[int], amount: int, expected: list[int]) -> None:
    shares = level(np.array([amount]), np.zeros((1, 3), np.int8), np.array(own))
    assert shares.tolist() == [expected]


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=8), st.data())
def test_all_bytes_go_to_ranks_that_can_read(amounts: list[int], data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 5))
    tier = st.sampled_from([0, 1, 2, 3, IMPOSSIBLE])
    rows = st.lists(tier, min_size=ranks, max_size=ranks).filter(lambda row: min(row) < IMPOSSIBLE)
    tiers = np.array([data.draw(rows) for _ in amounts], np.int8)
    own = np.array(data.draw(st.lists(st.integers(0, 10**15), min_size=ranks, max_size=ranks)))
    shares = level(np.array(amounts), tiers, own)
    assert shares.sum(axis=1).tolist() == amounts
    assert shares.min() >= 0
    assert not shares[tiers == IMPOSSIBLE].any()


def test_a_kind_makes_room_for_one_that_has_no_choice() -> None:
    """The first can be read by both ranks, the second by rank 0 alone: the first moves to rank 1."""
    tiers = np.array([[0, 0], [0, IMPOSSIBLE]], np.int8)
    assert level(np.array([100, 100]), tiers, np.zeros(2, np.int64)).sum(axis=0).tolist() == [100, 100]


def test_what_is_moved_along_a_chain_of_ranks() -> None:
    """Kind k can be read by ranks k and k + 1; only the first rank has something to begin with."""
    ranks = 12
    tiers = np.full((ranks - 1, ranks), IMPOSSIBLE, np.int8)
    for kind in range(ranks - 1):
        tiers[kind, kind : kind + 2] = 0
    own = np.zeros(ranks, np.int64)
    own[0] = 1200
    sums = own + level(np.full(ranks - 1, 1000), tiers, own).sum(axis=0)
    mean = sums.sum() / ranks
    assert sums.max() <= 1.25 * mean
