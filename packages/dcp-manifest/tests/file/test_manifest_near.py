"""Parts of a large index, whose CRCs are in the order of levels."""

from __future__ import annotations

import itertools
import tracemalloc
import zlib
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_base.errors import DcpError
from dcp_manifest import CorruptCheckpointError, read_index
from dcp_manifest.file import blob, manifest_near, manifest_write
from dcp_manifest.file.blob import FOOTER_BYTES, Blob, pack, read_footer
from dcp_manifest.file.manifest_near import read_near
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.levels import by_tensor, level_starts, order_by_level

BLOCK = 64


@pytest.fixture(autouse=True)
def small_indexes_have_levels(monkeypatch):
    monkeypatch.setattr(manifest_write, "RUNS_ABOVE_CHUNKS", 1)
    for module in (manifest_write, manifest_near):
        monkeypatch.setattr(module, "FEW_CHUNKS", 3)
    for module in (blob, manifest_near):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(manifest_near, "_FIRST_BYTES", 256)
    monkeypatch.setattr(manifest_near, "_CHUNKS_PER_LEVEL", 0)


def cut_by_rows(ranks, rows, columns):
    """The last ranks have fewer rows, or none."""
    each = -(-rows // ranks)
    starts = [min(rank * each, rows) for rank in range(ranks + 1)]
    return (rows, columns), [((low, 0), (high - low, columns)) for low, high in itertools.pairwise(starts)]


def cut_as_grid(ranks, width, rows, columns):
    boxes = [((rank // width * rows, rank % width * columns), (rows, columns)) for rank in range(ranks)]
    return (-(-ranks // width) * rows, width * columns), boxes


@st.composite
def large_indexes(draw, make_index):
    """Tensors that ranks cut by rows or as a grid, some with borders of blocks; a few whole, and one cut unevenly."""
    ranks = draw(st.integers(8, 24))
    tensors, rows = [], []

    def add(shape, boxes, first_rank=0):
        number = len(tensors)
        tensors.append((f"t{number}", 0, 0, 0, shape, boxes))
        for rank, (_, sizes) in enumerate(boxes):
            size = 4 * int(np.prod(sizes))
            rows.append(((rank + first_rank) % ranks, number << 32, 0, size, 0, 0, 0, draw(st.integers(0, 2**32 - 1))))

    for _ in range(draw(st.integers(2, 6))):
        columns = draw(st.sampled_from([3, 1000, 40_000]))
        if draw(st.booleans()):
            add(*cut_by_rows(ranks, draw(st.integers(ranks - 3, 4 * ranks)), columns), draw(st.integers(0, 3)))
        else:
            add(*cut_as_grid(ranks, draw(st.integers(1, ranks)), draw(st.integers(1, 3)), columns))
    if draw(st.booleans()):
        add((5, 2), [((0, 0), (5, 2))])
        add((), [((), ())])
        edges = np.cumsum([0, *(draw(st.integers(0, 4)) for _ in range(ranks))]).tolist()
        add((edges[-1],), [((low,), (high - low,)) for low, high in itertools.pairwise(edges)])
    files = tuple(f"__{rank}_0.distcp" for rank in range(ranks))
    return make_index(tensors, chunk_rows=rows, dtypes=("float32",), files=files)


@st.composite
def boxes_in(draw, shape):
    box = []
    for size in shape:
        low = draw(st.integers(0, size))
        box.append((low, draw(st.integers(low, size)) - low))
    return tuple(zip(*box, strict=True)) if box else ((), ())


def fetch_of(data, asked=None):
    def fetch(offset, count):
        if asked is not None:
            asked.append((offset, count))
        return data[offset : offset + count]

    return fetch


def chunks_of(index):
    """Box and item of each chunk, by tensor."""
    found, ragged = {}, index.ragged_starts(index.chunk_items)
    chunks, boxes = index.chunk_starts().tolist(), index.box_starts().tolist()
    for row, name in enumerate(index.tensor_names):
        ndim, own = int(index.tensor_ndim[row]), []
        for number, chunk in enumerate(range(chunks[row], chunks[row + 1])):
            at = slice(boxes[row] + number * ndim, boxes[row] + (number + 1) * ndim)
            item = index.stored_item(index.chunk_items, chunk, ragged)
            facts = (item.file, item.offset, item.length, item.lead, item.stored_bytes, item.crc32)
            own.append(
                (index.chunk_offsets[at].tolist(), index.chunk_sizes[at].tolist(), facts, item.running_crcs.tolist())
            )
        found[name] = own
    return found


def touches(chunk, box):
    offsets, sizes, *_ = chunk
    return all(
        offset < start + extent and offset + size > start
        for offset, size, start, extent in zip(offsets, sizes, *box, strict=True)
    )


def test_a_part_has_the_chunks_that_overlap_and_no_others(make_index):
    parts = []

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def compare(draw):
        index = draw.draw(large_indexes(make_index))
        data = encode(index, interop=False)
        whole = chunks_of(read_index(data, file="f"))
        assert whole == chunks_of(index)
        boxes, at = {}, 0
        for name, ndim in zip(index.tensor_names, index.tensor_ndim.tolist(), strict=True):
            shape, at = index.tensor_shape[at : at + ndim].tolist(), at + ndim
            if draw.draw(st.integers(0, 4)):
                boxes[name] = draw.draw(st.lists(boxes_in(shape), max_size=2))
        near = read_near(fetch_of(data), len(data), lambda: boxes, file="f")
        parts.append(near is not None)
        if near is None:
            assert read_footer(data[-FOOTER_BYTES:], size=len(data), file="f").major < 3
            return
        for name, chunks in chunks_of(near).items():
            if len(whole[name]) <= 3:
                assert chunks == whole[name]
                continue
            own = boxes.get(name, [])
            needed = [chunk for chunk in whole[name] if any(touches(chunk, box) for box in own)]
            assert all(chunk in chunks for chunk in needed)
            assert all(chunk in whole[name] for chunk in chunks)
            if len(own) <= 1:
                assert chunks == needed

    compare()
    assert sum(parts) * 2 > len(parts)


@pytest.fixture
def even(make_index):
    """Thirty tensors that 64 ranks cut by rows, in chunks of two blocks."""
    tensors, rows = [], []
    for number in range(30):
        shape, boxes = cut_by_rows(64, 128, 10_000)
        tensors.append((f"t{number}", 0, 0, 0, shape, boxes))
        rows += [(rank, number * 80_000, 0, 80_000, 0, 0, 0, rank * 2654435761 % 2**32) for rank in range(64)]
    files = tuple(f"__{rank}_0.distcp" for rank in range(64))
    return make_index(tensors, chunk_rows=rows, dtypes=("float32",), files=files)


def wanted():
    return {f"t{number}": [((10, 0), (3, 10_000))] for number in range(30)}


def test_little_is_read(even):
    data, asked = encode(even, interop=False), []
    near = read_near(fetch_of(data, asked), len(data), wanted, file="f")
    assert near.is_part
    assert near.tensor_chunks.tolist() == [2] * 30
    crcs = 2 * 4 * 30 * 64
    assert sum(count for _, count in asked) < len(data) - crcs + crcs // 16
    assert len(asked) < 12


def test_damage_of_what_is_read_is_found(even):
    data = encode(even, interop=False)
    footer = read_footer(data[-FOOTER_BYTES:], size=len(data), file="f")
    asked = []
    read_near(fetch_of(data, asked), len(data), wanted, file="f")
    read = np.zeros(len(data), bool)
    for offset, count in asked:
        read[offset : offset + count] = True
    found = 0
    for place in range(footer.manifest_offset, len(data), 37):
        damaged = bytearray(data)
        damaged[place] ^= 1
        if not read[place]:
            read_near(fetch_of(bytes(damaged)), len(damaged), wanted, file="f")
            continue
        with pytest.raises(CorruptCheckpointError):
            read_near(fetch_of(bytes(damaged)), len(damaged), wanted, file="f")
        found += 1
    assert found > 50


@pytest.mark.parametrize("name", ["framing", "chain", "checked"])
def test_chunks_that_are_not_raw_are_not_ordered(even, name):
    getattr(even.chunk_items, name)[5] ^= 1
    if name == "checked":
        even.chunk_items.running_crcs = even.chunk_items.running_crcs[1:]
    else:
        even.chains = (("stream.zstd/1",),)
    data = encode(even, interop=False)
    assert read_near(fetch_of(data), len(data), wanted, file="f") is None


def test_the_order_of_levels():
    chunks = np.array([3, 0, 1, 2])
    assert level_starts(chunks).tolist() == [0, 3, 5, 6]
    numbers = np.array([10, 11, 12, 30, 40, 41], np.uint32)
    ordered = np.empty_like(numbers)
    order_by_level(numbers, chunks, None, ordered)
    assert ordered.tolist() == [10, 30, 40, 11, 41, 12]
    assert by_tensor(ordered, chunks).tolist() == numbers.tolist()
    stored = np.array([1, 0, 2, 0, 2, 1], np.uint64) * 65536 + 1
    order_by_level(numbers, chunks, stored, ordered)
    assert ordered.tolist() == [10, 30, 40, 41, 11, 12]
    assert by_tensor(ordered, chunks, stored).tolist() == numbers.tolist()


@pytest.mark.parametrize("number", [1 << 16, 1 << 62])
def test_contradictions_cost_little_and_give_no_other_chunk(even, number):
    data = encode(even, interop=False)
    footer = read_footer(data[-FOOTER_BYTES:], size=len(data), file="f")
    plain = Blob(memoryview(data)[footer.manifest_offset : -FOOTER_BYTES], file="f")
    columns = {name: plain.read(name) for name in plain.header.columns if name != "block_crcs"}
    refused = 0
    for name, numbers in columns.items():
        changed = numbers.astype(np.uint64)
        changed[:1] = number
        crafted, crc = pack({**columns, name: changed}, plain.header.metadata)
        crafted += replace(
            footer, manifest_offset=0, manifest_bytes=len(crafted), manifest_crc32=zlib.crc32(crafted), index_crc32=crc
        ).to_bytes()
        near = None
        tracemalloc.start()
        with suppress(DcpError):
            near = read_near(fetch_of(crafted), len(crafted), wanted, file="f")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 400 * len(crafted), name
        try:
            known = chunks_of(read_index(crafted, file="f"))
        except DcpError:
            refused += near is None
        else:
            parts = {} if near is None else chunks_of(near)
            assert all(chunk in known[key] for key, own in parts.items() for chunk in own), name
    assert refused > 5
