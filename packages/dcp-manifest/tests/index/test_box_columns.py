from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_manifest.index.columns import BoxLayout, starts

BOXES = st.lists(st.lists(st.integers(0, 50), max_size=4), max_size=6)
UNIFORM = st.integers(0, 3).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 50), min_size=n, max_size=n), max_size=6)
)


@given(BOXES | UNIFORM)
def test_columns_by_dimension(boxes):
    flat = np.array([number for box in boxes for number in box], np.int64)
    layout = BoxLayout(np.array([len(box) for box in boxes], np.uint8))
    for dim in range(layout.dims):
        assert flat[layout.places(dim)].tolist() == [box[dim] for box in boxes if len(box) > dim]
        assert np.arange(len(boxes))[layout.rows(dim)].tolist() == [n for n, box in enumerate(boxes) if len(box) > dim]
    assert layout.volumes(flat).tolist() == [int(np.prod(box, dtype=np.int64)) for box in boxes]


def test_volumes_that_overflow_are_refused():
    with pytest.raises(ValueError, match="memory"):
        BoxLayout(np.array([2], np.uint8)).volumes(np.array([2**40, 2**40]))
    with pytest.raises(ValueError, match="memory"):
        BoxLayout(np.array([64, 1], np.uint8)).volumes(np.full(65, 2**62))


@pytest.mark.parametrize("place", [0, 2, 39])
def test_one_size_of_0_makes_a_volume_of_0(place):
    sizes = np.full(40, 2**62)
    sizes[place] = 0
    assert BoxLayout(np.array([40], np.uint8)).volumes(sizes).tolist() == [0]


def test_starts():
    assert starts(np.array([2, 0, 3], np.uint8)).tolist() == [0, 2, 2, 5]
    assert starts(np.zeros(0, np.int64)).tolist() == [0]
