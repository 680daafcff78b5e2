from __future__ import annotations

import zlib

import numpy as np
import pytest

from dcp_manifest.file.blob import BLOCK_BYTES, FOOTER_BYTES, Blob, Footer, read_footer
from dcp_manifest.file.index_problems import examine
from dcp_manifest.file.manifest_write import encode


@pytest.mark.parametrize("which", ["rich_bytes", "own_bytes"])
def test_nothing_is_wrong(which, request):
    assert examine(request.getfixturevalue(which), file="f").problems == ()


@pytest.mark.parametrize("which", ["rich_bytes", "own_bytes"])
def test_a_flip_anywhere_is_found(which, request):
    data = bytearray(request.getfixturevalue(which))
    for place in [*range(0, len(data) - FOOTER_BYTES, 7), *range(len(data) - FOOTER_BYTES, len(data))]:
        data[place] ^= 16
        problems = examine(bytes(data), file="f").problems
        assert problems, place
        assert {problem.file for problem in problems} == {"f"}
        data[place] ^= 16


def test_every_damaged_block_is_named(make_index):
    count = 60_000
    chunks = [(0, 64 * n, 0, 4, 0, 0, 0, n * 7919 % 2**32) for n in range(count)]
    index = make_index(
        [("t", 0, 0, 0, (count,), [((n,), (1,)) for n in range(count)])],
        chunk_rows=chunks, dtypes=("int32",), files=("a",),
    )  # fmt: skip
    data = bytearray(encode(index, interop=False))
    footer = read_footer(data[-FOOTER_BYTES:], size=len(data), file="f")
    blob = Blob(memoryview(bytes(data))[footer.manifest_offset : -FOOTER_BYTES], file="f")
    start = footer.manifest_offset + blob.header.data_start + blob.header.extents["chunk.crc32"][0]
    for block in (0, 2):
        data[start + block * BLOCK_BYTES + 9] ^= 1
    problems = examine(data, file="f").problems
    assert [problem.offset for problem in problems if "chunk.crc32" in problem.message] == [
        start,
        start + 2 * BLOCK_BYTES,
    ]


def test_a_wrong_stub_flag_is_found(own_bytes):
    footer = read_footer(own_bytes[-FOOTER_BYTES:], size=len(own_bytes), file="f")
    wrong = Footer(
        footer.manifest_offset, footer.manifest_bytes, footer.head_crc32, footer.manifest_crc32, footer.index_crc32
    )
    assert [
        "stub" in problem.message
        for problem in examine(own_bytes[:-FOOTER_BYTES] + wrong.to_bytes(), file="f").problems
    ]


def test_wrong_block_crcs_under_right_other_crcs_are_found(rich_bytes):
    footer = read_footer(rich_bytes[-FOOTER_BYTES:], size=len(rich_bytes), file="f")
    manifest = bytearray(rich_bytes[footer.manifest_offset : -FOOTER_BYTES])
    blob = Blob(memoryview(bytes(manifest)), file="f")
    place = blob.header.data_start + blob.header.extents["block_crcs"][0]
    manifest[place] ^= 1
    changed = Blob(memoryview(bytes(manifest)), file="f")
    crcs = changed.read("block_crcs").tobytes()
    index_crc = zlib.crc32(crcs, zlib.crc32(manifest[: blob.header.data_start]))
    sealed = Footer(footer.manifest_offset, len(manifest), footer.head_crc32, zlib.crc32(manifest), index_crc)
    data = rich_bytes[: footer.manifest_offset] + bytes(manifest) + sealed.to_bytes()
    assert len(np.frombuffer(crcs, "<u4")) > 10
    (problem,) = examine(data, file="f").problems
    assert "is damaged" in problem.message
