"""How many pieces a rank reads at once."""

from __future__ import annotations

from dcp_exchange.transfer import ConcurrencyLimit


def _begin_all(limit: ConcurrencyLimit) -> int:
    begun = 0
    while limit.allows_another:
        limit.begin()
        begun += 1
    return begun


def test_a_rank_begins_with_one_piece() -> None:
    assert _begin_all(ConcurrencyLimit(8)) == 1


def test_short_reads_lead_to_more_at_once_up_to_the_most() -> None:
    limit = ConcurrencyLimit(4)
    assert _begin_all(limit) == 1
    for more in (2, 2, 2, 1, 1):  # one that has ended, and one more until there are four
        limit.end(0.01)
        assert _begin_all(limit) == more


def test_long_reads_lead_to_fewer_and_never_to_none() -> None:
    limit = ConcurrencyLimit(8)
    limit.begin()
    limit.end(0.01)
    assert _begin_all(limit) == 2
    limit.end(3.0)
    assert not limit.allows_another  # one is still being read
    limit.end(3.0)
    assert _begin_all(limit) == 1


def test_reads_between_short_and_long_change_nothing() -> None:
    limit = ConcurrencyLimit(8)
    limit.begin()
    limit.end(0.7)
    assert _begin_all(limit) == 1
