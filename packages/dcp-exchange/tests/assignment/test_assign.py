"""Who reads what: `assign` against a slow and obvious model, which knows what each rank wants of each unit of bytes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dcp_exchange.assignment.assign import Assignment, assign
from dcp_io.reading.crc_checks import Demands

UNIT = 1000  # bytes
NAMES = ("a", "b", "c")
Unit = tuple[str, int]


@dataclass(frozen=True)
class Job:
    """What the ranks want, in units, and where they are."""

    rows: tuple[tuple[tuple[int, int, int, int], ...], ...]
    """Rows of each rank: object, start, stop, grain."""
    hosts: tuple[int, ...]

    def demands(self, rank: int) -> Demands:
        objects, starts, stops, grains = np.array(self.rows[rank], np.int64).reshape(-1, 4).T
        return Demands.of(NAMES, objects, starts * UNIT, stops * UNIT, grains * UNIT)

    def groups(self, *, merged: bool = True) -> list[tuple[Demands, list[int]]]:
        found: dict[Any, list[int]] = {}
        for rank, rows in enumerate(self.rows):
            found.setdefault(rows if merged else rank, []).append(rank)
        return [(self.demands(ranks[0]), ranks) for ranks in found.values()]

    def readers(self) -> dict[Unit, set[int]]:
        found: dict[Unit, set[int]] = {}
        for rank in range(len(self.rows)):
            for unit in units_of(self.demands(rank)):
                found.setdefault(unit, set()).add(rank)
        return found


def units(name: str, start: int, stop: int) -> set[Unit]:
    assert start % UNIT == stop % UNIT == 0
    return {(name, unit) for unit in range(start // UNIT, stop // UNIT)}


def units_of(demands: Demands) -> set[Unit]:
    rows = zip(demands.objects.tolist(), demands.starts.tolist(), demands.stops.tolist(), strict=True)
    return {unit for place, start, stop in rows for unit in units(demands.names[place], start, stop)}


def pieces_of(found: Assignment) -> list[tuple[set[Unit], set[int], int]]:
    """The pieces: their units, readers and owner."""
    readers = [found.readers[found.borders[of] : found.borders[of + 1]] for of in found.classes]
    assert all(np.all(np.diff(each) > 0) for each in readers)
    return [
        (
            units(found.names[found.objects[piece]], int(found.starts[piece]), int(found.stops[piece])),
            {*readers[piece].tolist()},
            int(found.owners[piece]),
        )
        for piece in range(len(found.starts))
    ]


@st.composite
def jobs(draw: st.DrawFn, *, aligned: bool = True) -> Job:
    """Ranks that want blocks of items; with `aligned` at the blocks' borders, and items without blocks as a whole."""
    items = []
    for place in range(draw(st.integers(1, 3))):
        position = 0
        for _ in range(draw(st.integers(1, 4))):
            position += draw(st.sampled_from([0, 0, 1, 4]))
            grain, blocks = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 12))
            items.append((place, position, grain, blocks, draw(st.integers(0, 4)) > 0))
            position += grain * blocks
    kinds = []
    for _ in range(draw(st.integers(1, 4))):
        rows = []
        for place, position, grain, blocks, cuttable in items:
            low, high = sorted(draw(st.tuples(st.integers(0, blocks), st.integers(0, blocks))))
            if draw(st.booleans()) or (aligned and not cuttable):
                low, high = (0, blocks) if draw(st.booleans()) else (0, 0)
            if low < high:
                shift = 0 if aligned else draw(st.integers(0, grain - 1))
                start, stop = position + low * grain + shift, position + high * grain
                rows.append((place, start, stop, grain if cuttable else 0))
        kinds.append(tuple(rows))
    world = draw(st.integers(1, 7))
    ranks = st.tuples(*[st.sampled_from(kinds)] * world)
    return Job(draw(ranks), draw(st.tuples(*[st.sampled_from([7, 3, 11])] * world)))


HOLDERS = st.none() | st.fixed_dictionaries({name: st.sets(st.sampled_from([3, 7, 11]), min_size=1) for name in NAMES})
SMALL = {"SMALLEST_PIECE_BYTES": 6 * UNIT, "LARGEST_PIECE_BYTES": 12 * UNIT}


def assigned(
    job: Job, holders: Mapping[str, Any] | None = None, *, merged: bool = True, gap: int = 1, **limits: int
) -> Assignment:
    """The assignment, with pieces of sizes that fit the small objects of these tests."""
    with mock.patch.multiple("dcp_exchange.assignment.assign", **(SMALL | limits)):
        return assign(job.groups(merged=merged), job.hosts, holders=holders, gap_bytes=gap * UNIT)


def visible(job: Job, holders: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The holders, as the ranks' hosts can be: each object is somewhere."""
    here = {*job.hosts}
    return holders and {name: (has & here) or {job.hosts[0]} for name, has in holders.items()}


def able(job: Job, holders: Mapping[str, Any] | None, name: str) -> set[int]:
    return {rank for rank, host in enumerate(job.hosts) if holders is None or host in holders[name]}


@given(jobs(), HOLDERS, st.integers(0, 4))
def test_each_unit_is_in_one_piece_with_its_readers_or_read_alone(job: Job, holders: Any, gap: int) -> None:
    holders, readers = visible(job, holders), job.readers()
    pieces = pieces_of(assigned(job, holders, gap=gap))
    covered = [unit for found, _, _ in pieces for unit in found]
    assert len(covered) == len({*covered})
    for unit, ranks in readers.items():
        alone = len(ranks) == 1 and ranks <= able(job, holders, unit[0])
        assert (unit in {*covered}) != alone
    for found, ranks, _ in pieces:
        unwanted = [unit for unit in found if unit not in readers]
        assert all(readers[unit] == ranks for unit in found if unit not in unwanted)
        assert all(longest <= gap for longest in gaps(unwanted))
        assert {min(found), max(found)} <= readers.keys()


def gaps(missing: Sequence[Unit]) -> list[int]:
    """Lengths of runs of units."""
    numbers = sorted(unit for _, unit in missing)
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    return [len([*run]) for _, run in runs]


def test_a_piece_does_not_reach_over_what_another_rank_reads_alone() -> None:
    both = ((0, 0, 1, 1), (0, 2, 3, 1))
    job = Job((both, (*both, (0, 1, 2, 1))), (3, 3))
    assert [found for found, _, _ in pieces_of(assigned(job, gap=2))] == [{("a", 0)}, {("a", 2)}]
    job = Job((both, both), (3, 3))
    assert [found for found, _, _ in pieces_of(assigned(job, gap=2))] == [{("a", unit) for unit in range(3)}]


@given(jobs())
def test_pieces_end_where_rows_end_or_may_be_cut(job: Job) -> None:
    found = assigned(job)
    rows = [(NAMES[place], *row) for rows in job.rows for place, *row in rows]
    ends = {(name, end) for name, start, stop, _ in rows for end in (start, stop)}
    for piece in range(len(found.starts)):
        name = found.names[found.objects[piece]]
        for end in (int(found.starts[piece]) // UNIT, int(found.stops[piece]) // UNIT):
            around = [(start, grain) for other, start, stop, grain in rows if other == name and start < end < stop]
            assert (name, end) in ends or all(grain and (end - start) % grain == 0 for start, grain in around)
            assert all(grain for _, grain in around)


@given(jobs())
def test_pieces_have_the_wanted_sizes(job: Job) -> None:
    found = assigned(job)
    limit = max(12, *(grain for rows in job.rows for *_, grain in rows), 0) * UNIT
    uncut = {(NAMES[place], start) for rows in job.rows for place, start, _, grain in rows if grain == 0}
    for piece in range(len(found.starts)):
        name, size = found.names[found.objects[piece]], found.stops[piece] - found.starts[piece]
        assert size <= limit or (name, found.starts[piece] // UNIT) in uncut


@given(jobs(aligned=False), HOLDERS)
def test_rows_that_must_not_be_cut_are_not(job: Job, holders: Any) -> None:
    holders, readers = visible(job, holders), job.readers()
    pieces = pieces_of(assigned(job, holders))
    of_unit = {unit: number for number, (found, _, _) in enumerate(pieces) for unit in found}
    for unit, ranks in readers.items():
        assert unit in of_unit or len(ranks) == 1
        assert unit not in of_unit or ranks <= pieces[of_unit[unit]][1]
    for rank in range(len(job.rows)):
        for place, start, stop, grain in job.rows[rank]:
            if grain == 0:
                assert len({of_unit.get(unit) for unit in units(NAMES[place], start * UNIT, stop * UNIT)}) == 1


@given(jobs(), HOLDERS)
def test_owners_can_read_and_are_level(job: Job, holders: Any) -> None:
    holders, readers = visible(job, holders), job.readers()
    found = assigned(job, holders)
    pieces = pieces_of(found)
    covered = {unit for units, _, _ in pieces for unit in units}
    ranks = range(len(job.hosts))
    own = [sum(readers[unit] == {rank} for unit in readers.keys() - covered) for rank in ranks]
    for units_, _, owner in pieces:
        assert owner in able(job, holders, next(iter(units_))[0])
    given_ = [sum(len(units_) for units_, _, owner in pieces if owner == rank) for rank in ranks]
    largest = max((len(units_) for units_, _, _ in pieces), default=0)
    best = level_of(own, [(len(units_), able(job, holders, next(iter(units_))[0])) for units_, _, _ in pieces])
    for rank in ranks:
        assert not given_[rank] or own[rank] + given_[rank] <= 1.05 * best + largest + 1e-9


def level_of(own: Sequence[int], sizes: Sequence[tuple[int, set[int]]]) -> float:
    """The lowest level that is possible for the fullest rank that reads for others: some ranks have too much alone."""
    most = 0.0
    ranks = {rank for _, able in sizes for rank in able}
    for count in range(1, len(ranks) + 1):
        for some in itertools.combinations(sorted(ranks), count):
            forced = sum(size for size, able in sizes if able <= {*some})
            if forced:
                most = max(most, water(sorted(own[rank] for rank in some), forced))
    return most


def water(levels: Sequence[int], amount: int) -> float:
    """The level after an amount is poured over some levels."""
    for count in range(len(levels), 0, -1):
        found = (sum(levels[:count]) + amount) / count
        if found >= levels[count - 1]:
            return found
    raise AssertionError


@given(jobs(), HOLDERS, st.randoms())
def test_the_order_and_number_of_groups_changes_nothing(job: Job, holders: Any, random: Any) -> None:
    holders = visible(job, holders)
    found = assigned(job, holders)
    groups = job.groups(merged=random.random() < 0.5)
    random.shuffle(groups)
    for _, ranks in groups:
        random.shuffle(ranks)
    with mock.patch.multiple("dcp_exchange.assignment.assign", **SMALL):
        again = assign(groups, job.hosts, holders=holders, gap_bytes=UNIT)
    assert found.names == again.names
    for column in ("objects", "starts", "stops", "owners", "classes", "borders", "readers"):
        assert np.array_equal(getattr(found, column), getattr(again, column)), column
        assert getattr(found, column).dtype == getattr(again, column).dtype


@given(jobs(aligned=False), st.integers(1, 6))
def test_coarse_sets_hold_all_that_want_the_piece(job: Job, limit: int) -> None:
    readers = job.readers()
    with mock.patch("dcp_exchange.assignment.assign.SMALLEST_CELL_BYTES", 1024):
        pieces = pieces_of(assigned(job, MOST_READERS=limit))
    of_unit = {unit: number for number, (found, _, _) in enumerate(pieces) for unit in found}
    assert len(of_unit) == sum(len(found) for found, _, _ in pieces)
    for unit, ranks in readers.items():
        assert unit in of_unit or len(ranks) == 1
        assert unit not in of_unit or ranks <= pieces[of_unit[unit]][1]
    for found, ranks, _ in pieces:
        assert all(longest <= 1 for longest in gaps([unit for unit in found if unit not in readers]))
        assert ranks == set().union(*(readers.get(unit, set()) for unit in found)) or len(ranks) > 1
