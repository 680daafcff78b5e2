from __future__ import annotations

import json
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_manifest import CorruptCheckpointError
from dcp_manifest.file.blob import (
    BLOCK_BYTES,
    BLOCK_CRCS,
    FOOTER_BYTES,
    Footer,
    LazyBlob,
    WholeBlob,
    first_blocks,
    index_crc32,
    pack,
    pack_strings,
    read_footer,
    unpack_strings,
)


def test_blocks_have_crcs_in_the_order_of_names():
    columns = {"b": np.arange(40_000, dtype=np.uint16), "a": np.ones(3, np.uint8), "c": np.zeros(0, np.uint64)}
    blob = WholeBlob(memoryview(pack(columns, {"x": 1})[0]), file="f")
    assert blob.header.metadata == {"x": 1}
    raw = columns["b"].tobytes()
    crcs = [zlib.crc32(b"\1\1\1"), zlib.crc32(raw[:BLOCK_BYTES]), zlib.crc32(raw[BLOCK_BYTES:])]
    assert blob.read(BLOCK_CRCS, 0, 3).tolist() == crcs
    assert first_blocks(blob.header) == ({"a": 0, "b": 1, "c": 3}, 3)
    assert np.array_equal(blob.read("b", 5, 9), [5, 6, 7, 8])


def test_bytes_are_those_of_the_safetensors_library():
    save = pytest.importorskip("safetensors.numpy").save
    dtypes = [np.uint8, np.uint16, np.uint32, np.uint64]
    columns = {f"{name}.{n}": np.arange(5 * n, dtype=dtypes[n % 4])[::2] for name in "ba" for n in range(8)}
    metadata = {"a": ['"\\/\n\x7f\u2028ß\U0001f600', "\ud800"], "b": 1}
    blob, _ = pack(columns, metadata)
    arrays = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    arrays[BLOCK_CRCS] = WholeBlob(memoryview(blob), file="f").read(BLOCK_CRCS, 0, 14)
    assert blob == save(arrays, {"dcp-manifest": json.dumps(metadata, separators=(",", ":"))})


def with_header(text):
    return memoryview(struct.pack("<Q", len(text)) + text + bytes(16))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"__metadata__":{}}',
        b'{"__metadata__":{"dcp-manifest":"[]"}}',
        b'{"__metadata__":{"dcp-manifest":"{"}}',
        *(
            b'{"__metadata__":{"dcp-manifest":"{}"},"a":' + entry + b"}"
            for entry in (
                b"5",
                b'{"dtype":"U8","shape":[1]}',
                b'{"dtype":"U8","shape":[1,1],"data_offsets":[0,1]}',
                b'{"dtype":"U8","shape":[2],"data_offsets":[0,1]}',
                b'{"dtype":"U8","shape":[-1],"data_offsets":[1,0]}',
                b'{"dtype":"U8","shape":[1],"data_offsets":[16,17]}',
                b'{"dtype":"U8","shape":[true],"data_offsets":[0,1]}',
                b'{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}',
                b'{"dtype":[],"shape":[1],"data_offsets":[0,1]}',
                b'{"dtype":"U64","shape":[2305843009213693952],"data_offsets":[0,0]}',
                b"[" * 100_000,
                b"1" * 10_000,
            )
        ),
    ],
)
def test_headers_that_are_none(text):
    with pytest.raises(CorruptCheckpointError, match="manifest"):
        WholeBlob(with_header(text), file="f")


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 8, b"\x01" + bytes(7)])
def test_blobs_without_room_for_a_header(data):
    with pytest.raises(CorruptCheckpointError, match="no room"):
        WholeBlob(memoryview(data), file="f")


def lazy(columns, *, start=64, metadata=None, damage=None):
    manifest, crc = pack(columns, metadata or {})
    whole = WholeBlob(memoryview(manifest), file="f")
    assert index_crc32(whole.data, whole.header) == crc
    footer = Footer(start, len(manifest), 0, zlib.crc32(manifest), crc)
    data = bytearray(bytes(start) + manifest)
    if damage is not None:
        data[start + whole.header.data_start + whole.header.extents[damage][0]] ^= 1
    return LazyBlob(lambda offset, length: bytes(data[offset : offset + length]), footer, file="f")


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 0), (0, 1), (0, 100_000), (32_767, 32_769), (32_768, 65_536), (99_999, 100_000), (5, 5)],
)
def test_parts_of_columns(start, stop):
    numbers = np.arange(100_000).astype(np.uint16)
    blob = lazy({"a": np.ones(5, np.uint8), "b": numbers, "c": np.zeros(70_000, np.uint8)})
    assert np.array_equal(blob.read("b", start, stop), numbers[start:stop])


def test_only_the_damaged_block_is_refused():
    blob = lazy({"a": np.zeros(70_000, np.uint16)}, damage="a")
    assert not blob.read("a", 32_768, 70_000).any()
    with pytest.raises(CorruptCheckpointError, match="a is damaged"):
        blob.read("a", 0, 1)


def test_a_header_longer_than_the_first_read():
    columns = {f"column {n:04}": np.full(2, n % 256, np.uint8) for n in range(1_000)}
    blob = lazy(columns, metadata={"long": "x" * 50_000})
    assert blob.read("column 0777", 0, 2).tolist() == [777 % 256] * 2


def test_the_header_is_checked():
    with pytest.raises(CorruptCheckpointError):
        lazy({"a": np.ones(3, np.uint8)}, damage="block_crcs")


@pytest.mark.parametrize(("dtype", "count"), [("U8", 7), ("U8", 8), ("U16", 4), ("U64", 1)])
def test_block_crcs_are_32_bit_numbers(dtype, count):
    """A header may call them anything; found by fuzzing."""
    manifest, _ = pack({"a": np.ones(3, np.uint8), "b": np.ones(3, np.uint8)}, {})
    length = int.from_bytes(manifest[:8], "little")
    header = json.loads(manifest[8 : 8 + length])
    start = header["block_crcs"]["data_offsets"][0]
    size = count * int(dtype[1:]) // 8
    header["block_crcs"] = {"dtype": dtype, "shape": [count], "data_offsets": [start, start + size]}
    text = json.dumps(header).encode()
    changed = len(text).to_bytes(8, "little") + text + manifest[8 + length :]
    whole = WholeBlob(memoryview(changed), file="f")
    footer = Footer(0, len(changed), 0, zlib.crc32(changed), index_crc32(whole.data, whole.header))
    with pytest.raises(CorruptCheckpointError, match="32-bit"):
        LazyBlob(lambda offset, length: changed[offset : offset + length], footer, file="f")


@given(st.lists(st.text(st.characters(codec="utf-8") | st.just("\ud800"))))
def test_strings_survive(strings):
    text, lengths = pack_strings(strings)
    assert unpack_strings(text, lengths.astype(np.int64)) == strings


@pytest.mark.parametrize("lengths", [[1], [4], [2, 2], [2**62, 2**62, 2**62, 2**62, 3], []])
def test_lengths_must_add_up(lengths):
    with pytest.raises(ValueError, match="text"):
        unpack_strings(np.frombuffer(b"abc", np.uint8), np.array(lengths, np.int64))


def test_a_cut_through_a_character_is_refused():
    with pytest.raises(ValueError, match="decode"):
        unpack_strings(np.frombuffer("ß".encode(), np.uint8), np.array([1, 1]))


FOOTER = Footer(1000, 2000, 1, 2, 3, 1)


def test_a_footer_has_64_bytes_at_fixed_places():
    data = FOOTER.to_bytes()
    assert len(data) == FOOTER_BYTES == 64
    assert data[:16] == b"\x93DCPMAN\n" + bytes([1, 0, 0, 0, 1, 0, 0, 0])
    assert data[16:44] == bytes.fromhex("e803000000000000 d007000000000000 01000000 02000000 03000000")
    assert data[44:56] == bytes(12)
    assert data[60:] == b"DCP\x93"


def test_a_footer_is_read_back():
    assert read_footer(FOOTER.to_bytes(), size=3064, file="f") == FOOTER


@pytest.mark.parametrize("size", [0, 63, 64, 3063, 3065, 10**12])
def test_a_footer_must_fit_the_file(size):
    with pytest.raises(CorruptCheckpointError, match="bytes"):
        read_footer(FOOTER.to_bytes(), size=size, file="f")


@pytest.mark.parametrize("tail", [b"", b"x" * 63, b"x" * 64])
def test_other_files_have_no_footer(tail):
    assert read_footer(tail, size=100, file="f") is None


def test_every_flip_in_a_footer_is_noticed():
    for place in range(64):
        data = bytearray(FOOTER.to_bytes())
        data[place] ^= 4
        with pytest.raises(CorruptCheckpointError):
            read_footer(bytes(data), size=3064, file="f")
