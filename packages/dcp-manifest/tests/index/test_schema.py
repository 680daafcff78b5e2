from __future__ import annotations

import pytest

from dcp_manifest import UnsafeCheckpointError
from dcp_manifest.index.schema import check_index, check_relative_path, derived_bytes


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


def change(table, name, row, value):
    getattr(table, name)[row] = value


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda items: change(items.blocks, "counts", 2, 2), "blocks is not 3"),
        (lambda items: change(items.blocks, "counts", 0, 3), "blocks is not 7"),
        (lambda items: change(items.blocks, "block_bytes", 0, 3), "without encoded blocks"),
        (lambda items: change(items.blocks, "block_bytes", 2, 0), "without encoded blocks"),
        (lambda items: change(items.blocks, "block_bytes", 2, 8192), "do not add up to its dtype"),
        (lambda items: change(items.blocks, "block_bytes", 2, (64 << 20) + 1), "too long"),
        (lambda items: change(items.blocks, "lengths", 1, 2999), "do not fill"),
        (lambda items: change(items, "chain", 2, 0), "no transform|ask"),
        (lambda items: change(items, "framing", 2, 1), "a frame"),
        (lambda items: change(items, "checked", 2, 0), "no CRC"),
    ],
)
def test_encoded_blocks_that_contradict_the_rest(blocked, damage, sentence):
    check_index(blocked)
    damage(blocked.chunk_items)
    with pytest.raises(ValueError, match=sentence):
        check_index(blocked)


def test_only_chunks_are_encoded_in_blocks(blocked, rich):
    rich.object_items.blocks = type(blocked.chunk_items.blocks)(
        *(getattr(blocked.chunk_items.blocks, name)[:2] for name in ("counts", "block_bytes")),
        *(getattr(blocked.chunk_items.blocks, name)[:1] for name in ("lengths", "crcs")),
    )
    with pytest.raises(ValueError, match="object is encoded"):
        check_index(rich)


@pytest.mark.parametrize("path", ["a", "__0_0.distcp", "a/b/c", "a.b/..c", "ä ö", "...", "ab:c"])
def test_paths_inside(path):
    check_relative_path(path, file="f")


@pytest.mark.parametrize(
    "path", ["", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/./b", "a\\b", "a\0", "c:a"]
)
def test_paths_elsewhere(path):
    with pytest.raises(UnsafeCheckpointError, match="f names"):
        check_relative_path(path, file="f")
