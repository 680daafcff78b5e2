"""Demands of a rank: the canonical form."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dcp_io.reading.crc_checks import Demands

ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 12), st.sampled_from([0, 1, 2, 4])), max_size=12
)


def columns(**changes: Any) -> dict[str, Any]:
    valid = {
        "names": ("a", "b"),
        "objects": np.array([0, 0, 1], np.int32),
        "starts": np.array([0, 10, 5]),
        "stops": np.array([10, 30, 6]),
        "grains": np.array([0, 5, 1]),
    }
    return valid | changes


def demands_of(rows: list[tuple[int, int, int, int]], names: tuple[str, ...] = ("c", "a", "b")) -> Demands:
    objects, starts, sizes, grains = np.array(rows, np.int64).reshape(-1, 4).T
    return Demands.of(names, objects, starts, starts + sizes, grains)


def wanted(rows: list[tuple[str, int, int]]) -> set[tuple[str, int]]:
    return {(name, byte) for name, start, stop in rows for byte in range(start, stop)}


def rows_of(demands: Demands) -> list[tuple[str, int, int]]:
    names = [demands.names[place] for place in demands.objects]
    return list(zip(names, demands.starts.tolist(), demands.stops.tolist(), strict=True))


@given(ROWS)
def test_of_keeps_every_wanted_byte(rows: list[tuple[int, int, int, int]]) -> None:
    names = ("c", "a", "b")
    found = demands_of(rows)
    assert wanted(rows_of(found)) == wanted([(names[place], start, start + size) for place, start, size, _ in rows])


@given(ROWS)
def test_of_allows_only_cuts_that_every_row_allows(rows: list[tuple[int, int, int, int]]) -> None:
    names = ("c", "a", "b")
    found = demands_of(rows)
    for (name, start, stop), grain in zip(rows_of(found), found.grains.tolist(), strict=True):
        for cut in range(start + grain, stop, grain) if grain else ():
            for place, first, size, step in rows:
                if names[place] == name and first < cut < first + size:
                    assert step
                    assert (cut - first) % step == 0


@given(ROWS, st.randoms())
def test_equal_demands_have_equal_digests(rows: list[tuple[int, int, int, int]], random: Any) -> None:
    again = [row for row in rows if row[2]]
    random.shuffle(again)
    renamed = [({0: 2, 1: 0, 2: 1}[place], *row) for place, *row in again]
    found, other = demands_of(rows), demands_of(renamed, ("a", "b", "c"))
    assert rows_of(found) == rows_of(other)
    assert found.grains.tolist() == other.grains.tolist()
    assert found.digest() == other.digest()


def test_different_demands_have_different_digests() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"names": ("a", "c")},
        {"names": ("", "ab")},
        {"objects": np.array([0, 1, 1], np.int32), "starts": np.array([0, 10, 35]), "stops": np.array([10, 30, 36])},
        {"starts": np.array([1, 10, 5])},
        {"stops": np.array([9, 30, 6])},
        {"grains": np.array([0, 5, 0])},
    ]
    assert len({Demands(**columns(**each)).digest() for each in changes}) == len(changes)


def test_nothing_is_a_demand_too() -> None:
    assert demands_of([]).names == ()
    assert demands_of([(0, 3, 0, 1)]).digest() == demands_of([]).digest()
