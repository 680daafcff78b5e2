"""Shares of ranks: together they are the global batches, whatever the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_data.rank_batches import Share, shares_of

PLACES = st.fixed_dictionaries(
    {
        "consumed": st.integers(0, 60),
        "length": st.integers(0, 200),
        "global_batch_size": st.integers(1, 40),
        "world_size": st.integers(1, 9),
        "micro_batches": st.integers(1, 4),
        "drop_last": st.booleans(),
    }
)


def of_all_ranks(place: dict[str, Any]) -> list[list[Share]]:
    return [[*shares_of(rank=rank, **place)] for rank in range(place["world_size"])]


@given(PLACES)
def test_parts_of_a_step_are_its_global_batch_in_order(place: dict[str, Any]) -> None:
    ranks = of_all_ranks(place)
    (count,) = {len(shares) for shares in ranks}  # all ranks take the same number of batches
    micro = place["micro_batches"]
    position = min(place["consumed"], place["length"])
    for step in range(0, count, micro):
        parts = [share for shares in ranks for share in shares[step : step + micro]]
        taken = [each for share in parts if share.weight for each in range(share.start, share.stop)]
        assert taken == [*range(position, position + len(taken))]
        sizes = {share.stop - share.start if share.weight else 0 for share in parts}
        assert max(sizes) - min(sizes) <= 1
        position += len(taken)
        assert {share.step_end for shares in ranks for share in shares[step + micro - 1 : step + micro]} == {position}
        assert all(share.step_end is None for shares in ranks for share in shares[step : step + micro - 1])
    left = place["length"] - position
    assert left < (place["global_batch_size"] if place["drop_last"] else 1) or count == 0


@given(PLACES)
def test_weights_make_the_mean_over_ranks_the_mean_over_the_global_batch(place: dict[str, Any]) -> None:
    ranks = of_all_ranks(place)
    micro = place["micro_batches"]
    for step in range(0, len(ranks[0]), micro):
        parts = [share for shares in ranks for share in shares[step : step + micro]]
        means = [sum(range(share.start, share.stop)) / (share.stop - share.start) for share in parts]
        mean = sum(share.weight * each for share, each in zip(parts, means, strict=True)) / place["world_size"]
        taken = [each for share in parts if share.weight for each in range(share.start, share.stop)]
        assert mean == pytest.approx(sum(taken) / len(taken))


@given(PLACES)
def test_every_part_has_a_sample_of_the_epoch(place: dict[str, Any]) -> None:
    for share in (share for shares in of_all_ranks(place) for share in shares):
        assert 0 <= share.start < share.stop <= place["length"]
