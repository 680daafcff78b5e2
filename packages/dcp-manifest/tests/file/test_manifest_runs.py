"""Manifests of format 2.0, whose even columns are runs."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_manifest import CorruptCheckpointError, UnsupportedFormatError, read_index
from dcp_manifest.file import blob, manifest_write
from dcp_manifest.file.blob import FOOTER_BYTES, Blob, pack, read_footer
from dcp_manifest.file.manifest_read import ManifestReader
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index import columns, schema
from dcp_manifest.stock.stock_write import is_stub

RANKS, TENSORS = 32, 10


@pytest.fixture(autouse=True)
def small_indexes_have_runs(monkeypatch):
    monkeypatch.setattr(manifest_write, "RUNS_ABOVE_CHUNKS", 1)


@pytest.fixture
def even(make_index):
    """Ten tensors, each cut evenly over 32 ranks: by rows, or as a grid of 4 by 8."""
    tensors, rows = [], []
    for number in range(TENSORS):
        grid = (32, 1) if number % 2 else (4, 8)
        boxes = [((rank // grid[1] * 2, rank % grid[1] * 3), (2, 3)) for rank in range(RANKS)]
        tensors.append((f"t{number}", 0, 0, 0, (grid[0] * 2, grid[1] * 3), boxes))
        rows += [(rank, number * 64, 0, 24, 0, 0, 0, rank * 2654435761 % 2**32) for rank in range(RANKS)]
    return make_index(
        tensors, chunk_rows=rows, dtypes=("float32",), files=tuple(f"__{rank}_0.distcp" for rank in range(RANKS))
    )


def footer_of(data):
    return read_footer(data[-FOOTER_BYTES:], size=len(data), file="f")


def whole_blob(data):
    return Blob(memoryview(data)[footer_of(data).manifest_offset : -FOOTER_BYTES], file="f")


def test_an_even_index_is_small_and_reads_the_same(even, assert_same, monkeypatch):
    data = encode(even, interop=False)
    assert_same(even, read_index(data, file="f"))
    monkeypatch.setattr(manifest_write, "RUNS_ABOVE_CHUNKS", RANKS * TENSORS)
    plain = encode(even, interop=False)
    assert (footer_of(data).major, footer_of(plain).major) == (2, 1)
    crcs = 4 * RANKS * TENSORS
    others = [whole_blob(one).header.data_bytes - crcs for one in (data, plain)]
    assert others[0] < 800 < 1900 < others[1]


def test_an_index_with_more_rows_than_bytes_in_runs_is_stored_without_runs(make_index, assert_same):
    ranks = 20_000
    boxes = [((rank * 2,), (2,)) for rank in range(ranks)]
    rows = [(0, rank * 8, 0, 8, 0, 0, 0, None) for rank in range(ranks)]
    index = make_index(
        [("t", 0, 0, 0, (ranks * 2,), boxes)], chunk_rows=rows, dtypes=("float32",), files=("__0_0.distcp",)
    )
    data = encode(index, interop=False)
    assert footer_of(data).major == 1
    assert_same(index, read_index(data, file="f"))


@st.composite
def even_indexes(draw, make_index):
    """Tensors that are cut over ranks as grids, in replicas that begin on other ranks, and perhaps one odd offset."""
    ranks = draw(st.integers(2, 40))
    tensors, rows = [], []
    for number in range(draw(st.integers(1, 6))):
        width, shift = draw(st.integers(1, ranks)), draw(st.integers(0, ranks - 1))
        boxes = [((rank // width * 2, rank % width * 3), (2, 3)) for rank in range(ranks)]
        tensors.append((f"t{number}", 0, 0, 0, (-(-ranks // width) * 2, width * 3), boxes))
        rows += [((rank + shift) % ranks, number * 64, 0, 24, 0, 0, 0, rank) for rank in range(ranks)]
    if draw(st.booleans()):
        odd = draw(st.integers(0, len(rows) - 1))
        rows[odd] = (rows[odd][0], draw(st.integers(0, 2**40)), *rows[odd][2:])
    files = tuple(f"__{rank}_0.distcp" for rank in range(ranks))
    return make_index(tensors, chunk_rows=rows, dtypes=("float32",), files=files)


def test_any_even_index_reads_the_same(make_index, assert_same):
    majors = []

    @settings(max_examples=100, deadline=None)
    @given(even_indexes(make_index))
    def read_again(index):
        data = encode(index)
        majors.append(footer_of(data).major)
        assert_same(index, read_index(data, file="f"))

    read_again()
    assert {1, 2} == set(majors)
    assert majors.count(2) * 2 > len(majors)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_index_reads_the_same(indexes, assert_same, data):
    index = data.draw(indexes)
    assert_same(index, read_index(encode(index), file="f"))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_an_index_in_parts_has_the_same_bytes(indexes, data):
    index = data.draw(indexes)
    whole = encode(index)
    at_once = data.draw(st.integers(1, 5))
    with ExitStack() as patches:
        for module in (columns, manifest_write, schema):
            patches.enter_context(mock.patch.object(module, "CHUNKS_AT_ONCE", at_once))
        assert encode(index) == whole


def test_an_index_without_even_columns_stays_in_format_1(rich):
    assert footer_of(encode(rich)).major == 1


def test_a_reader_of_format_1_names_the_version(even, monkeypatch):
    monkeypatch.setattr(blob, "MAJOR", 1)
    with pytest.raises(UnsupportedFormatError, match=r"format 2\.0.*install a newer dcp-manifest"):
        read_index(encode(even), file="f")


CASES = {
    "no number of runs": {"rows": {"chunk.file": 0}},
    "more runs": {"rows": {"chunk.file": 2}},
    "runs that are text": {"rows": {"chunk.file": "1"}},
    "a missing part": {"chunk.file.step": None},
    "other repeats": {"chunk.file.repeats": np.array([TENSORS + 1], np.uint8)},
    "no repeats": {"chunk.file.repeats": np.array([0], np.uint8)},
    "huge repeats": {"chunk.file.repeats": np.array([2**40], np.uint64)},
    "huge lengths": {"chunk.file.length": np.array([2**63], np.uint64)},
    "a file that is not there": {"chunk.file.first": np.array([1], np.uint8)},
    "a position beyond any file": {"chunk.position.first": np.array([2**62], np.uint64)},
    "a box beyond its tensor": {"chunk.offset.1.step": np.array([4], np.uint8)},
}


@pytest.mark.parametrize("name", CASES)
def test_contradictions_are_named(even, name):
    data = encode(even, interop=False)
    whole = whole_blob(data)
    columns = {key: whole.read(key) for key in whole.header.columns}
    del columns["block_crcs"]
    changed = dict(CASES[name])
    metadata = {**whole.header.metadata}
    metadata["rows"] = {**metadata["rows"], **changed.pop("rows", {})}
    assert changed.keys() <= columns.keys()
    kept = {key: values for key, values in {**columns, **changed}.items() if values is not None}
    crafted, index_crc32 = pack(kept, metadata)
    footer = blob.Footer(0, len(crafted), 0, blob.zlib.crc32(crafted), index_crc32, 1, 2)
    with pytest.raises(CorruptCheckpointError):
        read_index(crafted + footer.to_bytes(), file="f")
    assert ManifestReader(whole).whole().tensor_names == even.tensor_names


def test_stock_has_to_be_asked_for_above_the_limit(rich, assert_same):
    for interop, stub in ((None, True), (True, False), (False, True)):
        data = encode(rich, interop=interop)
        assert is_stub(data) == stub
        assert_same(rich, read_index(data, file="f"))
    assert b"more than 1 chunks and was not saved with interop=True" in encode(rich)
