from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_manifest.index import column_runs
from dcp_manifest.index.column_runs import ColumnRuns

RUN = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 9), st.integers(-3, 3), st.integers(-9, 9))


def numbers_of(runs):
    return np.array(
        [
            (first + piece * jump + number * step) % 2**64
            for repeats, length, first, step, jump in runs
            for piece in range(repeats)
            for number in range(length)
        ],
        np.uint64,
    )


def runs_of(rows):
    return ColumnRuns(*np.array(rows, np.int64).astype(np.uint64).reshape(-1, 5).T)


@given(st.lists(RUN, max_size=6))
def test_any_column(rows):
    wanted = numbers_of(rows)
    for runs in (runs_of(rows), ColumnRuns.of(wanted)):
        if runs is not None:
            runs.check(len(wanted))
            assert runs.numbers().tolist() == wanted.tolist()


RANKS = np.arange(64)
EVEN = {
    "files of tensors that all ranks cut": (np.tile(RANKS, 50), 1),
    "rows of a grid of 8 × 8": (np.tile(RANKS // 8 * 3, 50), 50),
    "columns of a grid of 8 × 8": (np.tile(RANKS % 8 * 5, 50), 1),
    "positions, the same on all ranks": (np.repeat(np.arange(50) ** 3, 64), 25),
    "positions that a replica shifts on some ranks": (
        np.repeat(np.arange(50) ** 2, 64) + 64 * np.tile(RANKS < 9, 50),
        100,
    ),
    "positions that fall": (np.tile(1000 - RANKS, 50), 1),
    "one number": (np.array([7]), None),
    "no number": (np.zeros(0, np.int64), 0),
}


@pytest.mark.parametrize("name", EVEN)
def test_even_columns_have_few_runs(name):
    column, count = EVEN[name]
    runs = ColumnRuns.of(column)
    assert (None if runs is None else len(runs.first)) == count
    if runs is not None:
        assert runs.numbers().tolist() == column.tolist()


def test_a_column_without_order_has_none():
    assert ColumnRuns.of(np.random.default_rng(0).integers(0, 2**32, 1000, dtype=np.uint32)) is None


@pytest.mark.parametrize(
    "rows",
    [
        [(2, 3, 0, 1, 1)],
        [(0, 3, 0, 1, 1), (1, 5, 0, 0, 0)],
        [(1, 0, 0, 1, 1), (1, 5, 0, 0, 0)],
        [(2**40, 2**40, 0, 1, 1)],
        [(2**33, 2**31, 0, 1, 1), (1, 5, 0, 0, 0)],
    ],
)
def test_runs_of_another_length_are_refused(rows):
    with pytest.raises(ValueError, match=r"a run is empty|numbers, not 5"):
        runs_of(rows).check(5)


@given(st.lists(RUN, max_size=12), st.integers(1, 9))
def test_blocks_of_a_column_give_the_same_numbers(rows, at_once):
    numbers = numbers_of(rows)
    with mock.patch.object(column_runs, "CHUNKS_AT_ONCE", at_once):
        found = ColumnRuns.of(numbers)
    if found is not None:
        found.check(len(numbers))
        assert found.numbers().tolist() == numbers.tolist()
