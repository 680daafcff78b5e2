from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from dcp_manifest.index.boxes import Box, find_hole, find_overlap, intersect, out_of_bounds, overlaps

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def random_boxes(source: random.Random) -> tuple[tuple[int, ...], Boxes]:
    ndim = source.randint(0, 3)
    shape = tuple(source.randint(1, 8) for _ in range(ndim))
    boxes: Boxes = []
    for _ in range(source.randint(0, 30)):
        offsets = tuple(source.randrange(extent) for extent in shape)
        sizes = tuple(source.randint(0, min(3, n - o)) for n, o in zip(shape, offsets, strict=True))
        boxes.append((offsets, sizes))
    return shape, boxes


def held(shape: tuple[int, ...], boxes: Boxes) -> np.ndarray:
    count = np.zeros(shape, int)
    for offsets, sizes in boxes:
        count[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    return count


@pytest.mark.parametrize("seed", range(20))
def test_overlaps_and_holes_agree_with_counting(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(100):
        shape, boxes = random_boxes(source)
        count = held(shape, boxes)
        pair = find_overlap(boxes)
        assert (pair is not None) == bool((count > 1).any())
        if pair is not None:
            assert pair[0] < pair[1]
            assert intersect(boxes[pair[0]], boxes[pair[1]]) is not None
        whole = ((0,) * len(shape), shape)
        hole = find_hole(whole, boxes)
        assert (hole is None) == bool(count.all())
        if hole is not None:
            assert math.prod(hole.sizes) > 0
            assert not held(shape, [hole])[count > 0].any()
            assert hole.offsets == tuple(np.argwhere(count == 0)[0])


@pytest.mark.parametrize("seed", range(5))
def test_overlaps_with_one_box(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(50):
        _, boxes = random_boxes(source)
        for box in boxes[:3]:
            expected = [(row, *shared) for row, other in enumerate(boxes) if (shared := intersect(box, other))]
            assert overlaps(box, boxes) == expected


def test_hole_of_a_part() -> None:
    boxes: Boxes = [((0, 0), (4, 2)), ((0, 4), (4, 4))]
    assert find_hole(((1, 0), (2, 2)), boxes) is None
    assert find_hole(((1, 1), (2, 5)), boxes) == Box((1, 2), (2, 2))
    assert find_hole(((1, 1), (0, 5)), boxes) is None
    assert find_hole(((), ()), []) == Box((), ())
    assert find_hole(((), ()), [((), ())]) is None
    assert find_hole(((0, 0), (2, 2)), []) == Box((0, 0), (2, 2))


def test_equal_volume_is_no_proof() -> None:
    boxes: Boxes = [((0,), (2,)), ((1,), (2,))]
    assert find_hole(((0,), (4,)), boxes) == Box((3,), (1,))


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "outside"),
    [
        ((2, 2), (0, 0), (2, 2), False),
        ((2, 2), (2, 0), (0, 2), False),
        ((), (), (), False),
        ((2, 2), (1, 0), (2, 2), True),
        ((2, 2), (-1, 0), (2, 2), True),
        ((2, 2), (0, 0), (2, -1), True),
        ((2, 2), (0,), (2,), True),
        ((2, 2), (0, 0), (2,), True),
    ],
)
def test_bounds(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], outside: bool) -> None:
    assert out_of_bounds(shape, offsets, sizes) is outside


def grids() -> dict[str, Boxes]:
    many = 4096
    side = 64
    return {
        "rows of a wide tensor": [((row, 0), (1, 4 * many)) for row in range(many)],
        "rows of a tall tensor": [((row * 8, 0), (8, 2)) for row in range(many)],
        "columns": [((0, column), (2, 1)) for column in range(many)],
        "grid": [(cell, (1, 1)) for cell in itertools.product(range(side), range(side))],
        "cube": [(cell, (1, 1, 1)) for cell in itertools.product(range(16), range(16), range(16))],
    }


@pytest.mark.parametrize("name", grids())
def test_sharding_of_any_direction_needs_no_comparison_of_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("compared pairs")

    from dcp_manifest.index import boxes as module

    monkeypatch.setattr(module, "_overlap_by_pairs", refuse)
    boxes = grids()[name]
    random.Random(1).shuffle(boxes)
    assert find_overlap(boxes) is None


def test_pairs_are_compared_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    from dcp_manifest.index import boxes as module

    monkeypatch.setattr(module, "_PAIRS_AT_ONCE", 3)
    pinwheel: Boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    wheels = [((x, y + 3 * turn), size) for turn in range(4) for (x, y), size in pinwheel]
    assert find_overlap(wheels) is None
    assert find_overlap([*wheels, ((1, 4), (1, 2))]) is not None
