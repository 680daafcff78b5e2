from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_manifest.index.boxes import coverage_problems
from dcp_manifest.index.columns import CheckpointIndex


def index_of(shape, boxes, name="t"):
    numbers = np.array([n for offsets, _ in boxes for n in offsets], np.int64)
    sizes = np.array([n for _, lengths in boxes for n in lengths], np.int64)
    return CheckpointIndex(
        dtypes=("uint8",),
        tensor_names=[name],
        tensor_dtype=np.zeros(1, np.uint8),
        tensor_flags=np.zeros(1, np.uint8),
        tensor_ndim=np.array([len(shape)], np.uint8),
        tensor_owner=np.zeros(1, np.uint32),
        tensor_shape=np.array(shape, np.int64),
        tensor_chunks=np.array([len(boxes)], np.int64),
        chunk_offsets=numbers,
        chunk_sizes=sizes,
    )


@pytest.mark.parametrize(
    ("shape", "boxes", "problem"),
    [
        ((), [((), ())], None),
        ((), [], "0 of the 1"),
        ((0, 4), [], None),
        ((0, 4), [((0, 0), (0, 4))], None),
        ((4,), [((0,), (4,))], None),
        ((4,), [((0,), (2,)), ((2,), (2,))], None),
        ((4,), [((0,), (2,)), ((4,), (0,)), ((2,), (2,))], None),
        ((4,), [((0,), (2,)), ((3,), (1,))], "3 of the 4"),
        ((4,), [((0,), (3,)), ((2,), (2,))], r"\(0,\)\+\(3,\) and \(2,\)\+\(2,\)"),
        ((4,), [((0,), (4,)), ((0,), (4,))], "same elements"),
        ((2, 2), [((0, 0), (2, 1)), ((0, 1), (2, 1))], None),
        ((2, 2), [((0, 0), (2, 1)), ((0, 0), (1, 2)), ((1, 1), (1, 1))], "same elements"),
    ],
)
def test_table(shape, boxes, problem):
    found = coverage_problems(index_of(shape, boxes))
    if problem is None:
        assert found == []
    else:
        ((name, message),) = found
        assert name == "t"
        with pytest.raises(ValueError, match=problem):
            raise ValueError(message)


BOX = st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 3), st.integers(0, 4)).map(
    lambda n: ((n[0], n[2]), (min(n[1], 3 - n[0]), min(n[3], 3 - n[2])))
)


@settings(deadline=None)
@given(st.lists(BOX, max_size=6))
def test_agrees_with_counting(boxes):
    count = np.zeros((3, 3), int)
    for (a, b), (m, n) in boxes:
        count[a : a + m, b : b + n] += 1
    assert (coverage_problems(index_of((3, 3), boxes)) == []) == bool((count == 1).all())


def test_many_chunks():
    boxes = [((r * 2, c * 3), (2, 3)) for r, c in itertools.product(range(40), range(40))]
    assert coverage_problems(index_of((80, 120), boxes)) == []
    assert coverage_problems(index_of((80, 120), [*boxes, ((79, 119), (1, 1))]))
    assert coverage_problems(index_of((80, 120), boxes[:-1]))
