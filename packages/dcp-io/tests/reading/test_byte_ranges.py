from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcp_io.archives.crc import running_crcs
from dcp_io.reading.read_plan import align_to_blocks, merge_ranges, merge_runs, split_range
from dcp_manifest.index.columns import Framing, StoredItem, block_bytes

RANGE = st.tuples(st.integers(0, 200), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(RANGE, max_size=12), st.integers(0, 20), st.integers(1, 80))
def test_merged_groups_cover_every_range_within_the_limit(ranges, gap, limit):
    groups = merge_ranges(ranges, gap_bytes=gap, limit_bytes=limit)
    members = [member for _, positions in groups for member in positions]
    assert sorted(members) == list(range(len(ranges)))
    for (start, stop), positions in groups:
        assert start == min(ranges[member][0] for member in positions)
        assert stop == max(ranges[member][1] for member in positions)
        assert stop - start <= max(limit, *(ranges[member][1] - ranges[member][0] for member in positions), 0)


@example([(0, 0), (1, 1), (2, 2)], 1)
@given(st.lists(RANGE, min_size=1, max_size=12), st.integers(0, 20))
def test_no_group_bridges_more_than_the_gap(ranges, gap):
    for (start, stop), positions in merge_ranges(ranges, gap_bytes=gap, limit_bytes=1000):
        wanted = np.zeros(stop - start + 1, bool)
        for member in positions:
            wanted[ranges[member][0] - start : ranges[member][1] - start] = True
        run = longest = 0
        for filled in wanted[: stop - start]:
            run = 0 if filled else run + 1
            longest = max(longest, run)
        assert longest <= gap


@pytest.mark.parametrize(
    ("ranges", "gap", "limit", "expected"),
    [
        ([], 0, 10, []),
        ([(0, 4), (4, 8)], 0, 8, [(0, 8)]),
        ([(0, 4), (4, 8)], 0, 7, [(0, 4), (4, 8)]),
        ([(0, 6), (4, 8)], 0, 7, [(0, 6), (4, 8)]),
        ([(0, 6), (4, 8)], 0, 8, [(0, 8)]),
        ([(8, 9), (0, 4)], 4, 10, [(0, 9)]),
        ([(8, 9), (0, 4)], 3, 10, [(0, 4), (8, 9)]),
    ],
)
def test_merge_table(ranges, gap, limit, expected):
    assert [group for group, _ in merge_ranges(ranges, gap_bytes=gap, limit_bytes=limit)] == expected


@given(st.integers(1, 400_000), st.data())
def test_aligned_ranges_hold_what_was_asked_and_lie_on_recorded_crcs(size, data):
    value, running = running_crcs([bytes(size)])
    item = StoredItem("f", 0, size, 0, size, Framing.RAW, value, running)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    first, last = align_to_blocks(item, start, stop)
    block = block_bytes(size)
    if start == stop:
        assert (first, last) == (start, stop)
        return
    assert first <= start
    assert stop <= last <= size
    assert first % block == 0
    assert last % block == 0 or last == size
    assert start - first < block
    assert last - stop < block


def test_an_item_without_running_crcs_is_only_checked_as_a_whole():
    item = StoredItem("f", 0, 10, 0, 10, Framing.RAW, 1, None)
    assert align_to_blocks(item, 3, 4) == (0, 10)


@given(st.integers(0, 100), st.integers(0, 300), st.integers(1, 50), st.integers(1, 20))
def test_split_pieces_join_up_on_aligned_borders(start, length, step, align):
    pieces = list(split_range(start, start + length, step_bytes=step, align_bytes=align))
    assert [n for a, b in pieces for n in range(a, b)] == list(range(start, start + length))
    assert all(border % align == 0 for _, border in pieces[:-1])


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)), max_size=12), st.integers(1, 20))
def test_merged_runs_hold_all_and_bridge_only_small_gaps(pairs, gap):
    wanted = {n for start, length in pairs for n in range(start, start + length)}
    starts = np.array([start for start, _ in pairs], np.int64)
    stops = starts + np.array([length for _, length in pairs], np.int64)
    merged = list(zip(*(side.tolist() for side in merge_runs(starts, stops, gap_bytes=gap)), strict=True))
    covered = [n for start, stop in merged for n in range(start, stop)]
    assert covered == sorted(set(covered))
    assert wanted <= set(covered)
    assert all(start - stop >= gap for (_, stop), (start, _) in itertools.pairwise(merged))
    holes = sorted(set(covered) - wanted)
    assert all(any(n + k in wanted for k in range(1, gap)) for n in holes)
