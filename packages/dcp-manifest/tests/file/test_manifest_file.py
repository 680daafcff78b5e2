from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_manifest import CheckpointIndex, CorruptCheckpointError, ManifestFile, read_index
from dcp_manifest.file.blob import FOOTER_BYTES, LazyBlob, read_footer
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.stored_items import join_items


class Reads:
    """A file that notes what is read of it."""

    def __init__(self, data):
        self.data = bytearray(data)
        self.ranges = []

    def __call__(self, offset, length):
        assert offset >= 0
        assert length >= 0
        self.ranges.append((offset, length))
        return bytes(self.data[offset : offset + length])

    def open(self):
        return ManifestFile(self, len(self.data), file="f")


def alone(index, row):
    """What the index of one tensor should be, worked out from that of all."""
    shapes, boxes, chunks = index.shape_starts(), index.box_starts(), index.chunk_starts()
    own = slice(chunks[row], chunks[row + 1])
    expected = CheckpointIndex(
        dtypes=index.dtypes,
        files=index.files,
        chains=index.chains,
        info=index.info,
        tensor_names=[index.tensor_names[row]],
        tensor_shape=index.tensor_shape[shapes[row] : shapes[row + 1]],
        chunk_offsets=index.chunk_offsets[boxes[row] : boxes[row + 1]],
        chunk_sizes=index.chunk_sizes[boxes[row] : boxes[row + 1]],
    )
    for name in ("tensor_dtype", "tensor_flags", "tensor_ndim", "tensor_owner", "tensor_chunks"):
        setattr(expected, name, getattr(index, name)[row : row + 1])
    if index.chunk_items is not None:
        items = index.chunk_items
        expected.chunk_items = join_items([items], np.arange(own.start, own.stop))
    return expected


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_one_tensor_is_as_in_the_whole(indexes, assert_same, data):
    index = data.draw(indexes)
    file = Reads(encode(index)).open()
    assert file.info == index.info
    assert set(file.names()) == {*index.tensor_names, *index.object_names, *index.alias_names}
    for row, (name, owner) in enumerate(zip(index.tensor_names, index.tensor_owner.tolist(), strict=True)):
        assert_same(alone(index, row), file.tensor(name, owner=owner))
    for name, row in zip(index.alias_names, index.alias_targets.tolist(), strict=True):
        found = file.tensor(name)
        assert (found.alias_names, found.alias_targets.tolist()) == ([name], [0])
        assert found.tensor_names == [index.tensor_names[row]]


def test_names_that_are_not_there(rich_bytes):
    file = Reads(rich_bytes).open()
    for name, owner in [("nope", 0), ("step", 1), ("opt.lr", 0), ("tied", 1)]:
        with pytest.raises(KeyError):
            file.tensor(name, owner=owner)


@pytest.fixture(scope="module")
def large(make_index):
    """3,000 chunks of one tensor, between two others; columns of several blocks."""
    rng = np.random.default_rng(0)

    def tensor(name, count):
        return name, 0, 0, 0, (count, 4), [((row, 0), (1, 4)) for row in range(count)]

    counts = {"a": 40_000, "b": 3_000, "c": 20_000}
    total = sum(counts.values())
    rows = zip(
        rng.integers(0, 3, total).tolist(),
        (rng.permutation(total) * 64).tolist(),
        *([0] * total, [16] * total, [0] * total, [0] * total, [0] * total),
        rng.integers(0, 2**32, total).tolist(),
        strict=True,
    )
    return make_index(
        [tensor(*pair) for pair in counts.items()], chunk_rows=list(rows), dtypes=("float32",), files=("a", "b", "c")
    )


def test_little_is_read(large, assert_same):
    data = encode(large, interop=False)
    reads = Reads(data)
    assert_same(alone(large, 1), reads.open().tensor("b"))
    assert sum(length for _, length in reads.ranges) < len(data) / 2
    assert all(length <= 2 * 64 * 1024 for _, length in reads.ranges)


def test_every_byte_that_is_used_is_checked(large, assert_same):
    """Damage anywhere: the tensor is as it was, or an error says where the damage is; never anything else."""
    data = encode(large, interop=False)
    expected = alone(large, 1)
    rng = np.random.default_rng(1)
    refused = 0
    for place in rng.integers(0, len(data), 300).tolist():
        reads = Reads(data)
        reads.data[place] ^= 1 << (place % 8)
        try:
            found = reads.open().tensor("b")
        except CorruptCheckpointError:
            refused += 1
        else:
            assert_same(expected, found)
    assert 0 < refused < 300


def test_flips_in_footer_header_and_block_crcs_are_refused(rich_bytes):
    footer = read_footer(rich_bytes[-FOOTER_BYTES:], size=len(rich_bytes), file="f")
    blob = LazyBlob(Reads(rich_bytes), footer, file="f")
    start, stop = blob.header.extents["block_crcs"]
    data_start = footer.manifest_offset + blob.header.data_start
    places = [
        *range(footer.manifest_offset, data_start),
        *range(data_start + start, data_start + stop),
        *range(len(rich_bytes) - FOOTER_BYTES, len(rich_bytes)),
    ]
    for place in places:
        reads = Reads(rich_bytes)
        reads.data[place] ^= 2
        with pytest.raises(CorruptCheckpointError):
            reads.open()


def test_the_offset_of_damage_is_named(rich_bytes):
    footer = read_footer(rich_bytes[-FOOTER_BYTES:], size=len(rich_bytes), file="f")
    blob = LazyBlob(Reads(rich_bytes), footer, file="f")
    reads = Reads(rich_bytes)
    place = footer.manifest_offset + blob.header.data_start + blob.header.extents["chunk.crc32"][0]
    reads.data[place + 5] ^= 1
    with pytest.raises(CorruptCheckpointError, match=r"chunk\.crc32 is damaged") as caught:
        reads.open().tensor("model.w")
    assert (caught.value.file, caught.value.offset) == ("f", place)


def test_truncation_at_any_length_is_refused(own_bytes):
    for length in range(len(own_bytes)):
        with pytest.raises(CorruptCheckpointError):
            Reads(own_bytes[:length]).open()


def test_a_file_that_shrinks_is_refused(own_bytes):
    reads = Reads(own_bytes)
    file = reads.open()
    del reads.data[-100:]
    del reads.data[:300]
    with pytest.raises(CorruptCheckpointError):
        file.tensor("rng", owner=1)


def test_it_agrees_with_decode(rich_bytes, assert_same):
    index = read_index(rich_bytes, file="f")
    assert_same(alone(index, 0), Reads(rich_bytes).open().tensor("model.w"))
