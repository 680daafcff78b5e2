"""How many pieces a rank reads at once."""

from __future__ import annotations

from dcp_exchange.pace import Pace


def _begin_all(pace: Pace) -> int:
    begun = 0
    while pace.allows_another:
        pace.begin()
        begun += 1
    return begun


def test_a_rank_begins_with_one_piece() -> None:
    assert _begin_all(Pace(8)) == 1


def test_short_reads_lead_to_more_at_once_up_to_the_most() -> None:
    pace = Pace(4)
    assert _begin_all(pace) == 1
    for more in (2, 2, 2, 1, 1):  # one that has ended, and one more until there are four
        pace.end(0.01)
        assert _begin_all(pace) == more


def test_long_reads_lead_to_fewer_and_never_to_none() -> None:
    pace = Pace(8)
    pace.begin()
    pace.end(0.01)
    assert _begin_all(pace) == 2
    pace.end(3.0)
    assert not pace.allows_another  # one is still being read
    pace.end(3.0)
    assert _begin_all(pace) == 1


def test_reads_between_short_and_long_change_nothing() -> None:
    pace = Pace(8)
    pace.begin()
    pace.end(0.7)
    assert _begin_all(pace) == 1
