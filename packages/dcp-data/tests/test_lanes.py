"""Lanes: every sample of every shard has one position, and workers have lanes of their own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_data.lanes import Lanes, Layout, default_lanes

LANES = st.builds(Lanes, st.integers(1, 30), st.integers(1, 5), st.integers(0, 40), st.booleans())
LENGTHS = st.lists(st.integers(0, 30), max_size=12)


@given(LENGTHS, LANES, st.integers(0, 5))
def test_every_sample_has_one_position(lengths: list[int], lanes: Lanes, epoch: int) -> None:
    layout = Layout(lengths, lanes, 3, epoch)
    assert layout.length == sum(lengths)
    found = []
    for position in range(layout.length):
        block, number = layout.block_of(position)
        found.append(layout.shard_at(layout.order_in(block)[number]))
    assert sorted(found) == [(shard, sample) for shard, length in enumerate(lengths) for sample in range(length)]


@given(LENGTHS, LANES)
def test_a_lane_goes_through_its_blocks_from_begin_to_end(lengths: list[int], lanes: Lanes) -> None:
    layout = Layout(lengths, lanes, 3, 0)
    at: dict[int, tuple[int, int]] = {}
    for position in range(layout.length):
        block, number = layout.block_of(position)
        assert block.stop - block.start <= max(1, lanes.shuffle_buffer)
        assert number == 0 if block.lane not in at or at[block.lane][0] != block.number else number > at[block.lane][1]
        assert block.lane not in at or block.number - at[block.lane][0] in (0, 1)
        at[block.lane] = (block.number, number)


def test_without_shuffling_and_with_one_lane_it_is_the_order_of_the_shards() -> None:
    layout = Layout([2, 0, 3], Lanes(1, 1, 0, False), 0, 0)
    places = [layout.order_in(layout.block_of(position)[0])[0] for position in range(5)]
    assert [layout.shard_at(place) for place in places] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]


def test_other_epochs_have_other_orders() -> None:
    lengths = [5] * 40
    orders = {tuple(Layout(lengths, Lanes(4, 1, 0, True), 1, epoch).shards) for epoch in range(5)}
    assert len(orders) == 5


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("global_batch_size", [16, 48, 256, 1024])
def test_by_default_no_two_workers_share_a_lane(global_batch_size: int, ranks: int, workers: int) -> None:
    count, chunk = default_lanes(global_batch_size, shards=1000)
    assert count <= 192
    readers: dict[int, tuple[int, int]] = {}
    for position in range(13 * global_batch_size):
        step, place = divmod(position, global_batch_size)
        reader = (place * ranks // global_batch_size, step % workers)
        assert readers.setdefault(position // chunk % count, reader) == reader


@given(st.integers(1, 5000), st.integers(0, 500))
def test_there_are_no_more_lanes_than_shards_by_default(global_batch_size: int, shards: int) -> None:
    count, chunk = default_lanes(global_batch_size, shards)
    assert 1 <= count <= max(1, shards)
    assert count * chunk % global_batch_size == 0
