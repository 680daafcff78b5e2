from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_manifest.index.runs import Runs, box_runs

DIMS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(0, 6)), max_size=5)


def box_of(dims):
    sizes = [size for size, _, _ in dims]
    offsets = [min(offset, size) for size, offset, _ in dims]
    lengths = [min(length, size - offset) for (size, _, length), offset in zip(dims, offsets, strict=True)]
    return sizes, offsets, lengths


def listed(runs: Runs, start: int, stop: int) -> list[tuple[int, int]]:
    return list(zip(*(side.tolist() for side in runs.within(start, stop)), strict=True))


@given(DIMS, st.sampled_from([1, 2, 8]))
def test_runs_are_the_boxs_bytes_in_order(dims, item_bytes):
    sizes, offsets, lengths = box_of(dims)
    flat = np.arange(int(np.prod(sizes)) * item_bytes).reshape(*sizes, item_bytes)
    box = flat[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].reshape(-1)
    runs = box_runs(sizes, offsets, lengths, item_bytes)
    parts = listed(runs, 0, flat.size)
    assert [n for a, b in parts for n in range(a, b)] == box.tolist()
    assert all(one[1] < other[0] for one, other in itertools.pairwise(parts)), "runs that touch are one"
    if box.size:
        assert (runs.start, runs.stop) == (box[0], box[-1] + 1)
        assert (runs.counts == ()) == (box.size == box[-1] + 1 - box[0])


@given(DIMS, st.integers(0, 6000), st.integers(0, 6000))
def test_within_cuts_at_the_ranges_ends(dims, one, other):
    runs = box_runs(*box_of(dims), 2)
    start, stop = sorted((one, other))
    everything = {n for a, b in listed(runs, 0, 1 << 20) for n in range(a, b)}
    assert [n for a, b in listed(runs, start, stop) for n in range(a, b)] == sorted(
        n for n in everything if start <= n < stop
    )


@given(DIMS, st.integers(0, 300))
def test_joined_runs_hold_all_and_bridge_no_gap_that_is_too_large(dims, gap):
    runs = box_runs(*box_of(dims), 2)
    before, after = listed(runs, 0, 1 << 20), listed(runs.joined(gap), 0, 1 << 20)
    assert all(any(a <= start and stop <= b for a, b in after) for start, stop in before)
    bridged = [(b, a) for (_, b), (a, _) in itertools.pairwise(before)]
    for stop, start in bridged:
        inside = any(a <= stop and start <= b for a, b in after)
        assert not inside or start - stop < gap


@given(DIMS, st.integers(0, 200), st.integers(1, 200))
def test_spans_are_a_part_of_the_bytes_in_order(dims, position, length):
    runs = box_runs(*box_of(dims), 2)
    numbers = [n for a, b in listed(runs, 0, 1 << 20) for n in range(a, b)]
    assert len(numbers) == runs.count * runs.run_bytes
    wanted = numbers[position : position + length]
    if not wanted:
        return
    spans = [*runs.spans(position, len(wanted))]
    assert [start + step for start, _, size in spans for step in range(size)] == wanted
    assert [offset + step for _, offset, size in spans for step in range(size)] == [*range(len(wanted))]
    assert runs.starts(0, runs.count).tolist() == [start for start, _ in listed(runs, 0, 1 << 20)]


def test_within_takes_memory_for_the_range_only():
    runs = Runs(5, 1 << 13, (4, 1 << 36), (1 << 51, 1 << 14))  # 2**38 runs
    middle = 5 + (1 << 51) + (1 << 40)
    starts, stops = runs.within(middle, middle + (1 << 20))
    assert len(starts) == 64
    assert (starts[0], stops[-1]) == (middle, middle + 63 * (1 << 14) + (1 << 13))


@pytest.mark.parametrize(
    ("sizes", "offsets", "lengths"), [((2,), (1,), (2,)), ((2,), (-1,), (1,)), ((2,), (0, 0), (1, 1))]
)
def test_a_box_outside_of_its_chunk_is_refused(sizes, offsets, lengths):
    with pytest.raises(ValueError, match="box"):
        box_runs(sizes, offsets, lengths, 1)
