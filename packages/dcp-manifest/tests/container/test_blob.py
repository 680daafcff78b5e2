from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from dcp_manifest import CorruptCheckpointError
from dcp_manifest.container.blob import BLOCK_BYTES, BLOCK_CRCS, WholeBlob, first_blocks, narrow, pack


@pytest.mark.parametrize(
    ("values", "dtype", "count"),
    [
        ([], "uint8", 0),
        ([0], "uint8", 1),
        ([255, 0], "uint8", 2),
        ([256, 0], "uint16", 2),
        ([65536, 0], "uint32", 2),
        ([2**32, 0], "uint64", 2),
        ([7, 7], "uint8", 1),
        ([7, 7, 7], "uint8", 1),
    ],
)
def test_narrow(values, dtype, count):
    column = narrow(np.array(values, np.uint64))
    assert (column.dtype, len(column)) == (np.dtype(dtype), count)
    assert np.array_equal(np.resize(column, len(values)), values)


def test_equal_rows_may_be_kept():
    assert len(narrow(np.array([7, 7]), collapse=False)) == 2


def test_blocks_have_crcs_in_the_order_of_names():
    columns = {"b": np.arange(40_000, dtype=np.uint16), "a": np.ones(3, np.uint8), "c": np.zeros(0, np.uint64)}
    blob = WholeBlob(memoryview(pack(columns, {"x": 1})), file="f")
    assert blob.header.metadata == {"x": 1}
    raw = columns["b"].tobytes()
    crcs = [zlib.crc32(b"\1\1\1"), zlib.crc32(raw[:BLOCK_BYTES]), zlib.crc32(raw[BLOCK_BYTES:])]
    assert blob.read(BLOCK_CRCS, 0, 3).tolist() == crcs
    assert first_blocks(blob.header) == ({"a": 0, "b": 1, "c": 3}, 3)
    assert np.array_equal(blob.read("b", 5, 9), [5, 6, 7, 8])


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
