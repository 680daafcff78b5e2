"""Who writes what several ranks hold: every thing once, level, cut only where that helps."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.planning import global_plan
from dcp_core.planning.global_plan import MIN_PART_BYTES, Candidates, Part, assign, cut_dim
from dcp_manifest.index.columns import starts

MIB = 1 << 20


def candidates(things):
    """Each thing: bytes, slices, holders, and whether its first holder must write it."""
    return Candidates(
        nbytes=np.array([nbytes for nbytes, *_ in things], np.int64),
        slices=np.array([slices for _, slices, *_ in things], np.int64),
        first=starts(np.array([len(holders) for _, _, holders, _ in things], np.int64)),
        ranks=np.array([rank for _, _, holders, _ in things for rank in holders], np.int64),
        settled=np.array([settled for *_, settled in things], bool),
    )


def shares(things, assigned, world):
    """Bytes of each rank; checks that everything is written once, by ranks that hold it."""
    loads = [0] * world
    for row, (nbytes, slices, holders, settled) in enumerate(things):
        parts = assigned.parts.get(row) or [Part(int(assigned.writer[row]), 0, slices)]
        assert (assigned.writer[row] == -1) == (row in assigned.parts)
        assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
        assert parts[-1].end == slices
        assert len({part.rank for part in parts}) == len(parts)
        assert {part.rank for part in parts} <= set(holders)
        if settled:
            assert parts == [Part(holders[0], 0, slices)]
        for part in parts:
            size = nbytes * (part.end - part.begin) // slices
            assert len(parts) == 1 or size >= global_plan.MIN_PART_BYTES
            loads[part.rank] += size
    return loads


@st.composite
def jobs(draw):
    world = draw(st.integers(1, 5))
    things = []
    for _ in range(draw(st.integers(0, 12))):
        slices = draw(st.integers(1, 40))
        holders = sorted(draw(st.sets(st.integers(0, world - 1), min_size=1)))
        things.append((slices * draw(st.integers(1, 9)), slices, holders, draw(st.booleans()) and draw(st.booleans())))
    return world, things


@settings(max_examples=500, deadline=None)
@given(jobs(), st.integers(1, 20))
def test_everything_is_written_once_by_who_holds_it(job, least):
    world, things = job
    with mock.patch.object(global_plan, "MIN_PART_BYTES", least):
        first = assign(candidates(things), world)
        again = assign(candidates(things), world)
        shares(things, first, world)
    assert first.writer.tolist() == again.writer.tolist()
    assert first.parts == again.parts


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 16), st.lists(st.integers(1, 400), min_size=1, max_size=30), st.lists(st.integers(0, 90)))
def test_replicas_level_what_ranks_hold_alone(world, replicas, alone):
    everybody = list(range(world))
    things = [(size * MIB, size * 8, everybody, False) for size in replicas]
    things += [(size * MIB + 1, 1, [rank], False) for rank, size in zip(everybody, alone, strict=False)]
    loads = shares(things, assign(candidates(things), world), world)
    held_alone = [size * MIB + 1 for size in alone[:world]] + [0] * (world - len(alone))
    level = global_plan._level(np.array(held_alone), sum(replicas) * MIB)
    # One part of the least size, one slice and one thing that is too small to be cut may lie above the level.
    slack = max(level / 128, MIN_PART_BYTES) + 2 * MIN_PART_BYTES
    assert max(loads) <= max(level + slack, *held_alone)


@pytest.mark.parametrize("world", [2, 4, 8, 16])
def test_a_large_embedding_is_cut_and_nothing_else(world):
    """Vocabulary 128,256 × 4,096 twice in bf16, and 32 layers; before, one rank had to write each embedding."""
    row = 4096 * 2
    layer = [(4096 * row, 4096)] * 2 + [(1024 * row, 1024)] * 2 + [(14336 * row, 14336)] * 3 + [(row, 4096)] * 2
    shapes = [(128256 * row, 128256), *layer * 32, (row, 4096), (128256 * row, 128256)]
    things = [(nbytes, slices, list(range(world)), False) for nbytes, slices in shapes]
    assigned = assign(candidates(things), world)
    loads = shares(things, assigned, world)
    assert max(loads) <= 1.02 * sum(loads) / world
    assert sum(map(len, assigned.parts.values())) <= 3 * world


def test_small_and_uncuttable_things_stay_whole():
    things = [(2 * MIB - 2, 100, [0, 1], False), (900 * MIB, 1, [0, 1], False)]
    assigned = assign(candidates(things), 2)
    assert assigned.parts == {}
    assert sorted(shares(things, assigned, 2)) == [2 * MIB - 2, 900 * MIB]


def test_ranks_with_little_choice_come_first():
    things = [(100 * MIB, 1, [0, 1, 2], False), (90 * MIB, 1, [0, 1], False), (90 * MIB, 1, [0, 1], False)]
    assert shares(things, assign(candidates(things), 3), 3) == [90 * MIB, 90 * MIB, 100 * MIB]


@pytest.mark.parametrize(("sizes", "dim"), [((), None), ((1, 1), None), ((7,), 0), ((1, 3, 5), 1)])
def test_boxes_are_cut_where_memory_stays_in_one_piece(sizes, dim):
    assert cut_dim(sizes) == dim
