from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_io.archives.crc import RunningCrc, combine, crc32, crc_at, running_crcs
from dcp_manifest.index.columns import Framing, StoredItem, block_bytes, border_count


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crc32_is_zlibs_and_combines(first, second):
    assert crc32(first) == zlib.crc32(first)
    assert crc32(second, crc32(first)) == zlib.crc32(first + second)
    assert combine(crc32(first), crc32(second), len(second)) == zlib.crc32(first + second)


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(0, 5 * 64 * 1024) | st.sampled_from([64 * 1024, 2 * 64 * 1024, 2 * 64 * 1024 + 1]),
    cuts=st.lists(st.floats(0, 1), max_size=5),
    seed=st.integers(0, 99),
)
def test_running_crcs_are_those_of_prefixes(size, cuts, seed):
    data = np.random.default_rng(seed).bytes(size)
    borders = sorted({0, size, *(int(cut * size) for cut in cuts)})
    pieces = [memoryview(data)[a:b] for a, b in itertools.pairwise(borders)]
    value, running = running_crcs(pieces)
    block = block_bytes(size)
    assert value == zlib.crc32(data)
    assert running.dtype == np.uint32
    assert len(running) == border_count(size)
    assert [int(v) for v in running] == [zlib.crc32(data[: block * (n + 1)]) for n in range(len(running))]


def test_running_crc_refuses_the_wrong_number_of_bytes():
    running = RunningCrc(3)
    running.update(b"ab")
    with pytest.raises(ValueError, match="1 of 3 bytes"):
        running.borders()
    with pytest.raises(ValueError, match="more bytes"):
        running.update(b"cd")


def test_crc_at_knows_only_recorded_places():
    data = bytes(3 * 64 * 1024 + 5)
    value, running = running_crcs([data])
    item = StoredItem("f", 0, len(data), 0, len(data), Framing.RAW, value, running)
    block = block_bytes(len(data))
    assert crc_at(item, 0) == 0
    assert crc_at(item, 2 * block) == zlib.crc32(data[: 2 * block])
    assert crc_at(item, len(data)) == value
    for position in (1, block + 1, 4 * block):
        with pytest.raises(ValueError, match="no CRC is recorded"):
            crc_at(item, position)
