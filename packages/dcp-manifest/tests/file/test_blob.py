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
    Blob,
    Footer,
    first_blocks,
    index_crc32,
    pack,
    pack_strings,
    read_footer,
    unpack_strings,
)


def test_blocks_have_crcs_in_the_order_of_names():
    columns = {"b": np.arange(40_000, dtype=np.uint16), "a": np.ones(3, np.uint8), "c": np.zeros(0, np.uint64)}
    data, crc = pack(columns, {"x": 1})
    blob = Blob(memoryview(data), file="f")
    assert index_crc32(blob.data, blob.header) == crc
    assert blob.header.metadata == {"x": 1}
    raw = columns["b"].tobytes()
    crcs = [zlib.crc32(b"\1\1\1"), zlib.crc32(raw[:BLOCK_BYTES]), zlib.crc32(raw[BLOCK_BYTES:])]
    assert blob.read(BLOCK_CRCS).tolist() == crcs
    assert first_blocks(blob.header) == ({"a": 0, "b": 1, "c": 3}, 3)
    assert np.array_equal(blob.read("b"), columns["b"])


def test_bytes_are_those_of_the_safetensors_library():
    save = pytest.importorskip("safetensors.numpy").save
    dtypes = [np.uint8, np.uint16, np.uint32, np.uint64]
    columns = {f"{name}.{n}": np.arange(5 * n, dtype=dtypes[n % 4])[::2] for name in "ba" for n in range(8)}
    metadata = {"a": ['"\\/\n\x7f\u2028ß\U0001f600', "\ud800"], "b": 1}
    blob = pack(columns, metadata)[0]
    arrays = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    arrays[BLOCK_CRCS] = Blob(memoryview(blob), file="f").read(BLOCK_CRCS)
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
        Blob(with_header(text), file="f")


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 8, b"\x01" + bytes(7)])
def test_blobs_without_room_for_a_header(data):
    with pytest.raises(CorruptCheckpointError, match="no room"):
        Blob(memoryview(data), file="f")


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
