"""The sweep over all rows, where numbers are large or collide."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from dcp_exchange.assignment.assign import Assignment, assign
from dcp_io.reading.crc_checks import Demands

ROWS = 40


def windows(base: int, ranks: int = 12) -> Assignment:
    """Windows that slide from rank to rank: many different sets of ranks."""
    starts = np.arange(ROWS) * 40
    groups = [
        (
            Demands.of(("a",), np.zeros(ROWS), base + starts + rank, base + starts + rank + 25, np.ones(ROWS)),
            [rank],
        )
        for rank in range(ranks)
    ]
    return assign(groups, [0] * ranks, gap_bytes=0)


@pytest.mark.parametrize("base", [1 << 40, 1 << 58, (1 << 61) + 7])
def test_objects_may_be_of_any_size(base: int) -> None:
    """Positions that leave no room for the number of a group are sorted another way."""
    far, near = windows(base), windows(0)
    assert len(near.starts) > ROWS
    assert np.array_equal(far.starts - base, near.starts)
    assert np.array_equal(far.stops - base, near.stops)
    for column in ("owners", "classes", "borders", "readers"):
        assert np.array_equal(getattr(far, column), getattr(near, column)), column


def test_sets_that_share_a_slot_of_the_hash_table_stay_apart() -> None:
    found = windows(0)
    assert len(found.borders) - 1 > 20
    with mock.patch("dcp_exchange.assignment.assign.SLOT_BITS", 1):
        again = windows(0)
    for column in ("starts", "stops", "owners", "classes", "borders", "readers"):
        assert np.array_equal(getattr(found, column), getattr(again, column)), column


@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
def test_parts_of_a_running_sum_join(chunk: int) -> None:
    found = windows(0)
    with (
        mock.patch("dcp_exchange.assignment.stretches.CHUNK", chunk),
        mock.patch("dcp_exchange.assignment.assign.CHUNK", chunk),
    ):
        again = windows(0)
    for column in ("starts", "stops", "owners", "classes", "borders", "readers"):
        assert np.array_equal(getattr(found, column), getattr(again, column)), column
