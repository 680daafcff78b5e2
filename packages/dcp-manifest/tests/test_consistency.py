from __future__ import annotations

import pytest

from dcp_manifest.consistency import check_index, derived_bytes


def one_chunk(make_index, shape, box, **more):
    return make_index(
        [("t", 0, 0, 0, shape, [box])],
        chunk_rows=[(0, 0, 0, 100, 0, 1, 0, None)],
        dtypes=("float32",),
        files=("a",),
        **more,
    )


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((4,), ((0,), (4,))),
        ((4,), ((3,), (1,))),
        ((4, 0), ((0, 0), (4, 0))),
        ((4, 2), ((4, 0), (0, 2))),
        ((5,), ((6,), (0,))),  # an empty shard as older writers place it
        ((), ((), ())),
    ],
)
def test_boxes_inside(make_index, shape, box):
    check_index(one_chunk(make_index, shape, box))


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((4,), ((1,), (4,))),
        ((4,), ((4,), (1,))),
        ((2**62,), ((2**62,), (2**62,))),
        ((4, 4), ((0, 1), (4, 4))),
        ((4,), ((-1,), (1,))),
        ((4,), ((0,), (-1,))),
    ],
)
def test_boxes_outside(make_index, shape, box):
    with pytest.raises(ValueError, match=r"beyond the tensor|negative"):
        check_index(one_chunk(make_index, shape, box))


def test_the_tensor_is_named(make_index):
    index = make_index(
        [("a", 0, 0, 0, (1,), [((0,), (1,))]), ("none", 0, 0, 0, (1,), []), ("b", 0, 0, 0, (2,), [((0,), (3,))])],
        chunk_rows=[(0, 0, 0, 100, 0, 1, 0, None)] * 2,
        dtypes=("float32",),
        files=("x",),
    )
    with pytest.raises(ValueError, match="'b' reaches beyond"):
        check_index(index)


def test_one_name_may_belong_to_several_ranks(make_index):
    def owners(first, second):
        return make_index([("t", first, 0, 0, (), [])], [("t", second)], dtypes=("int8",), files=("a",),
                          object_rows=[(0, 0, 0, 1, 0, 2, 0, 1)])  # fmt: skip

    check_index(owners(1, 2))
    check_index(owners(0, 1))
    for owner in (0, 1):
        with pytest.raises(ValueError, match="same name"):
            check_index(owners(owner, owner))


def test_bytes_of_chunks(rich, own):
    assert derived_bytes(rich).tolist() == [48, 48, 6, 8, 0, 160 * 1024**2, 2]
    own.dtypes = ("not_known", "uint8")
    assert derived_bytes(own).tolist() == [-1, 8, 4, 4]
