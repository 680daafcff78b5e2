from __future__ import annotations

import pickletools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_manifest.index.columns import Framing
from dcp_manifest.stock.stock_read import read_stock
from dcp_manifest.stock.stock_write import MARKER_MODULE, stock_head, unreadable_reason


def seen_by_stock(index):
    """What is left of an index in stock's records: aliases as tensors, no CRCs, no framing, no int keys."""
    rows = [*range(len(index.tensor_names)), *index.alias_targets.tolist()]
    shapes, boxes, chunks = index.shape_starts(), index.box_starts(), index.chunk_starts()
    table = {}
    for name, row in zip([*index.tensor_names, *index.alias_names], rows, strict=True):
        own = range(chunks[row], chunks[row + 1])
        items = [
            (index.files[index.chunk_items.file[n]], int(index.chunk_items.offset[n]), int(index.chunk_items.length[n]))
            for n in own
        ]
        table[name] = (
            index.dtypes[index.tensor_dtype[row]],
            int(index.tensor_flags[row]),
            index.tensor_shape[shapes[row] : shapes[row + 1]].tolist(),
            index.chunk_offsets[boxes[row] : boxes[row + 1]].tolist(),
            index.chunk_sizes[boxes[row] : boxes[row + 1]].tolist(),
            items,
            [index.chains[n - 1] if n else () for n in index.chunk_items.chain[own.start : own.stop]],
        )
    return table


def test_our_reader_finds_all_of_it_in_the_head(rich):
    index, end, modules = read_stock(stock_head(rich), file="f")
    assert seen_by_stock(index) == seen_by_stock(rich)
    assert index.object_names == rich.object_names
    assert index.object_items.length.tolist() == rich.object_items.length.tolist()
    assert index.paths == rich.paths
    assert modules == [MARKER_MODULE]
    assert end == len(stock_head(rich))


def has_equal_offsets(index):
    """Stock finds a chunk's place by its offsets: chunks of one tensor that share them cannot be told apart."""
    starts, boxes = index.chunk_starts().tolist(), index.box_starts().tolist()
    for row, ndim in enumerate(index.tensor_ndim.tolist()):
        count = starts[row + 1] - starts[row]
        offsets = index.chunk_offsets[boxes[row] : boxes[row + 1]].reshape(count, ndim).tolist()
        if len({tuple(offset) for offset in offsets}) < count:
            return True
    return False


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_head_is_a_pickle_that_says_the_same(indexes, data):
    index = data.draw(indexes)
    # Stock knows no owners, and only its own dtypes.
    index.dtypes = ("float32", "bool", "complex128", "float8_e5m2")
    index.tensor_owner[:] = 0
    index.object_owner[:] = 0
    names = [*index.tensor_names, *index.object_names, *index.alias_names]
    if len(set(names)) < len(names) or index.chunk_items is None or has_equal_offsets(index):
        return
    head = stock_head(index)
    for _ in pickletools.genops(head):
        pass
    found, _, _ = read_stock(head, file="f")
    assert seen_by_stock(found) == seen_by_stock(index)
    assert found.object_items.offset.tolist() == index.object_items.offset.tolist()
    assert found.paths == index.paths


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda index: index.tensor_owner.__setitem__(0, 3), "single ranks"),
        (lambda index: index.object_owner.__setitem__(0, 1), "single ranks"),
        (lambda index: setattr(index, "chunk_items", None), "where values are stored"),
        (lambda index: setattr(index, "chains", (("planes/1",),)), "transforms"),
        (lambda index: index.chunk_items.lead.__setitem__(0, 0), "layout"),
        (lambda index: index.chunk_items.length.__setitem__(0, 348), "layout"),
        (lambda index: index.chunk_items.framing.__setitem__(6, Framing.RAW), "layout"),
        (lambda index: index.object_items.lead.__setitem__(0, 1), "layout"),
    ],
)
def test_what_stock_cannot_read(rich, change, reason):
    assert unreadable_reason(rich) is None
    change(rich)
    assert reason in unreadable_reason(rich)


def test_a_scalar_takes_few_bytes(make_index):
    count = 20_000
    names = [f"state.{n}.step" for n in range(count)]
    index = make_index(
        [(name, 0, 0, 0, (), [((), ())]) for name in names],
        chunk_rows=[(0, 576 * n, 300, 4, 240, 0, 0, n * 2654435761 % 2**32) for n in range(count)],
        paths={name: ("state", n, "step") for n, name in enumerate(names)},
        dtypes=("float32",),
        files=("__0_0.0123456789abcdef.distcp",),
    )
    assert len(stock_head(index)) / count < 130


def test_numbers_of_every_width_survive(rich):
    rich.chunk_items.offset = np.array([0, 255, 256, 65_535, 65_536, 2**31, 2**61], np.uint64)
    index, _, _ = read_stock(stock_head(rich), file="f")
    assert index.chunk_items.offset[:7].tolist() == rich.chunk_items.offset.tolist()
