"""Permutations: every number once, each equally likely everywhere, the same for ever."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_data import permutation
from dcp_data.permutation import Permutation


@pytest.fixture(params=["table", "network"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "network":
        monkeypatch.setattr(permutation, "_MAX_TABLE_LENGTH", 0)
    return request.param


def whole(length: int, *labels: int | str) -> torch.Tensor:
    return Permutation(length, *labels).take(torch.arange(length))


@pytest.mark.usefixtures("each_way")
def test_every_number_comes_once() -> None:
    for length in [*range(70), 1000, 4097, 66_000]:
        assert torch.equal(whole(length, 7, length).sort().values, torch.arange(length)), length


@pytest.mark.usefixtures("each_way")
def test_other_labels_give_another_order() -> None:
    orders = [whole(1000, *labels).tolist() for labels in ((0, 0), (0, 1), (1, 0), (0, "0/0"), ("order", 0))]
    assert len({tuple(order) for order in orders}) == len(orders)


@given(st.integers(1, 1 << 62), st.integers(0, 1 << 63), st.data())
def test_numbers_of_long_ones_differ_and_are_within(length: int, seed: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, max(0, length - 100)))
    positions = torch.arange(begin, min(length, begin + 100))
    taken = Permutation(length, seed).take(positions).tolist()
    assert len({*taken}) == len(positions)
    assert all(0 <= each < length for each in taken)


def test_a_permutation_is_looked_up_anywhere() -> None:
    made = Permutation(1_000_000, 3, 4)
    positions = torch.randint(0, 1_000_000, (500,), generator=torch.Generator().manual_seed(0))
    one_by_one = [int(made.take(torch.tensor([each]))) for each in positions.tolist()]
    assert made.take(positions).tolist() == one_by_one


def test_lengths_beyond_the_limit_are_refused() -> None:
    for length in (-1, (1 << 62) + 1):
        with pytest.raises(ValueError, match=str(length)):
            Permutation(length)


def test_all_orders_of_few_numbers_are_equally_likely() -> None:
    for length, draws in ((2, 2000), (3, 2400), (4, 4800)):
        seen = Counter(tuple(whole(length, 5, epoch).tolist()) for epoch in range(draws))
        expected = draws / len([*permutations(range(length))])
        statistic = sum((seen[each] - expected) ** 2 / expected for each in permutations(range(length)))
        freedom = len([*permutations(range(length))]) - 1
        assert statistic < freedom + 5 * (2 * freedom) ** 0.5, (length, statistic)


def test_each_number_is_equally_likely_everywhere_and_so_is_each_distance_of_neighbours(each_way: str) -> None:
    length, draws = 150, 1500
    numbers = torch.arange(length)
    places, distances = torch.zeros(length * length), torch.zeros(length)
    for epoch in range(draws):
        order = whole(length, 11, epoch)
        places += torch.bincount(numbers * length + order, minlength=length * length)
        distances += torch.bincount((order[1:] - order[:-1]) % length, minlength=length)
    for counts, freedom in ((places, (length - 1) ** 2), (distances[1:], length - 2)):
        expected = counts.mean()
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert statistic < freedom + 6 * (2 * freedom) ** 0.5, (each_way, statistic, freedom)


def test_orders_never_change() -> None:
    """Saved positions belong to them: another algorithm needs another name in `ResumableSampler`'s state."""
    assert whole(10, "order", 0, 0).tolist() == [5, 3, 2, 6, 8, 4, 7, 0, 1, 9]
    positions = torch.tensor([0, 1, 2, 10**9 - 1])
    assert Permutation(10**9, "order", 0, 1).take(positions).tolist() == [610002468, 478021518, 674863374, 636198982]
