from __future__ import annotations

import json
import zlib

import numpy as np
import pytest

from dcp_manifest import CorruptCheckpointError
from dcp_manifest.container.blob import WholeBlob, index_crc32, pack
from dcp_manifest.container.footer import Footer
from dcp_manifest.container.lazy_blob import LazyBlob


def lazy(columns, *, start=64, metadata=None, damage=None):
    manifest = pack(columns, metadata or {})
    whole = WholeBlob(memoryview(manifest), file="f")
    footer = Footer(start, len(manifest), 0, zlib.crc32(manifest), index_crc32(whole.data, whole.header))
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
    manifest = pack({"a": np.ones(3, np.uint8), "b": np.ones(3, np.uint8)}, {})
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
