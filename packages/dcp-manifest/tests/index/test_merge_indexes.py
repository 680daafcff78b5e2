from __future__ import annotations

import pytest

from dcp_manifest import CorruptCheckpointError, read_index
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import ManifestInfo
from dcp_manifest.index.merge_indexes import merge_rank_indexes


def part(make_index, rank, tensors, objects=(), **more):
    """An index of one rank: every chunk and object in a file of that rank, the position telling the row."""
    chunks = sum(len(boxes) for *_, boxes in tensors)
    return make_index(
        [(name, 0, 0, 0, shape, boxes) for name, shape, boxes in tensors],
        [(name, 0) for name in objects],
        chunk_rows=[(0, 1000 * n + rank, 0, 90_000, 0, 1, 0, 7 + rank) for n in range(chunks)],
        object_rows=[(0, 10**6 + n, 0, 5, 0, 2, 0, 9) for n in range(len(objects))],
        dtypes=("float32",),
        files=(f"__{rank}_0.x.distcp",),
        info=ManifestInfo("x", 3, "t", 4, rank),
        **more,
    )


def chunks_of(index, name):
    row = index.tensor_names.index(name)
    chunks, boxes, ndim = index.chunk_starts(), index.box_starts(), int(index.tensor_ndim[row])
    found = []
    for number, chunk in enumerate(range(chunks[row], chunks[row + 1])):
        at = boxes[row] + number * ndim
        item = index.stored_item(index.chunk_items, chunk)
        assert item.running_crcs.tolist() == [0 if item.crc32 is None else item.running_crcs[0]]
        box = tuple(index.chunk_offsets[at : at + ndim].tolist()), tuple(index.chunk_sizes[at : at + ndim].tolist())
        found.append((*box, item.file, item.offset))
    return found


def test_chunks_of_all_ranks_equal_boxes_once(make_index, assert_same):
    parts = [
        part(make_index, 0, [("w", (4, 2), [((0, 0), (2, 2))]), ("same", (3,), [((0,), (3,))])], ["o", "p"]),
        part(make_index, 1, [("same", (3,), [((0,), (3,))]), ("w", (4, 2), [((2, 0), (2, 2))])], ["p", "q"]),
        part(make_index, 2, [("s", (), [((), ())]), ("w", (4, 2), [((0, 0), (2, 2))])]),
    ]
    merged = merge_rank_indexes(parts)
    assert merged.tensor_names == ["w", "same", "s"]
    assert chunks_of(merged, "w") == [
        ((0, 0), (2, 2), "__0_0.x.distcp", 0),
        ((2, 0), (2, 2), "__1_0.x.distcp", 1001),
    ]
    assert chunks_of(merged, "same") == [((0,), (3,), "__0_0.x.distcp", 1000)]
    assert chunks_of(merged, "s") == [((), (), "__2_0.x.distcp", 2)]
    assert merged.object_names == ["o", "p", "q"]
    assert [merged.files[row] for row in merged.object_items.file] == ["__0_0.x.distcp"] * 2 + ["__1_0.x.distcp"]
    assert merged.info == ManifestInfo("x", 3, "t", 4, None)
    assert_same(merged, read_index(encode(merged), file="f"))


def test_one_index_stays_what_it_is(rich, own, assert_same):
    for index in (rich, own):
        assert_same(index, merge_rank_indexes([index]))


def test_paths_of_the_lowest_rank_count(make_index):
    tensor = [("w", (1,), [((0,), (1,))])]
    parts = [
        part(make_index, 0, tensor, paths={"w": ("w",)}),
        part(make_index, 1, tensor, paths={"w": ("x",), "v": ("v",)}),
        part(make_index, 2, tensor),
    ]
    assert merge_rank_indexes(parts).paths == {"w": ("w",), "v": ("v",)}
    assert merge_rank_indexes(parts[2:]).paths is None


@pytest.mark.parametrize("shape", [(5,), (4, 1), ()])
def test_ranks_that_disagree_are_refused(make_index, shape):
    parts = [part(make_index, 0, [("w", (4,), [])]), part(make_index, 1, [("w", shape, [])])]
    with pytest.raises(CorruptCheckpointError, match=r"disagree.*key 'w'"):
        merge_rank_indexes(parts)


def test_other_dtypes_are_refused_and_their_tables_joined(make_index):
    parts = [part(make_index, rank, [("w", (4,), [])]) for rank in (0, 1)]
    parts[1].dtypes = ("int8",)
    with pytest.raises(CorruptCheckpointError, match=r"float32.*int8"):
        merge_rank_indexes(parts)
    parts[1].tensor_names = ["v"]
    merged = merge_rank_indexes(parts)
    assert [merged.dtypes[row] for row in merged.tensor_dtype] == ["float32", "int8"]


def test_aliases(make_index):
    both = [("a", (2,), [((0,), (2,))])]
    parts = [part(make_index, rank, both, aliases=[("b", 0)]) for rank in (0, 1)]
    merged = merge_rank_indexes(parts)
    assert (merged.alias_names, merged.alias_targets.tolist()) == (["b"], [0])


def test_an_alias_that_is_a_tensor_elsewhere_becomes_one(make_index, assert_same):
    parts = [
        part(make_index, 0, [("a", (4,), [((0,), (2,))])], aliases=[("b", 0), ("c", 0)]),
        part(make_index, 1, [("a", (4,), [((2,), (2,))]), ("b", (4,), [((2,), (2,))])]),
    ]
    merged = merge_rank_indexes(parts)
    assert merged.tensor_names == ["a", "b"]
    assert (merged.alias_names, merged.alias_targets.tolist()) == (["c"], [0])
    assert chunks_of(merged, "b") == [((0,), (2,), "__0_0.x.distcp", 0), ((2,), (2,), "__1_0.x.distcp", 1001)]
    assert_same(merged, read_index(encode(merged), file="f"))


def test_no_items(make_index):
    parts = [part(make_index, rank, [("w", (4,), [((rank,), (1,))])]) for rank in (0, 1)]
    for index in parts:
        index.chunk_items = index.object_items = None
    merged = merge_rank_indexes(parts)
    assert merged.chunk_items is None
    assert merged.chunk_offsets.tolist() == [0, 1]
