"""Indexes to test with, random and fixed."""

from __future__ import annotations

import runpy
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from dcp_manifest import CheckpointIndex
from dcp_manifest.index.columns import EncodedBlocks, Framing, ItemColumns, ManifestInfo, TensorFlags, border_counts
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.index.literal_keys import LiteralKey
from dcp_manifest.index.stored_items import block_columns

INFO = ManifestInfo("0123456789abcdef", 2, "test/1", 3, None, 17, (("run", "a"), ("run", "b")))


def items(rows, *, borders=None, blocks=None):
    """Item columns from (file, offset, lead, stored_bytes, trail, framing, chain, crc or None), and encoded blocks."""
    columns = list(zip(*rows, strict=True)) or [()] * 8
    file, offset, lead, stored, trail, framing, chain, crc = columns
    stored_bytes = np.array(stored, np.uint64)
    checked = np.array([value is not None for value in crc], np.uint8)
    blocks = block_columns(blocks or [])
    bordered = checked if blocks is None else checked * (blocks.counts == 0)
    count = int((border_counts(stored_bytes) * bordered).sum())
    return ItemColumns(
        file=np.array(file, np.uint32),
        offset=np.array(offset, np.uint64),
        length=np.array(lead, np.uint64) + stored_bytes + np.array(trail, np.uint64),
        lead=np.array(lead, np.uint32),
        stored_bytes=stored_bytes,
        framing=np.array(framing, np.uint8),
        chain=np.array(chain, np.uint8),
        checked=checked,
        crc32=np.array([value or 0 for value in crc], np.uint32),
        running_crcs=np.arange(count, dtype=np.uint32) * 12345 if borders is None else borders(count),
        blocks=blocks,
    )


def encoded_blocks(block_bytes, lengths):
    """Blocks of these encoded lengths."""
    crcs = [number * 7919 for number in range(len(lengths))]
    return EncodedBlocks(block_bytes, np.array(lengths, np.uint32), np.array(crcs, np.uint32))


def index(
    tensors=(), objects=(), *, chunk_rows=(), object_rows=(), aliases=(), paths=None, info=INFO, blocks=None, **tables
):
    """An index from tensors (name, owner, dtype row, flags, shape, boxes) and objects (name, owner)."""
    flat = [number for tensor in tensors for number in tensor[4]]
    boxes = [box for tensor in tensors for box in tensor[5]]
    return CheckpointIndex(
        tensor_names=[tensor[0] for tensor in tensors],
        tensor_owner=np.array([tensor[1] for tensor in tensors], np.uint32),
        tensor_dtype=np.array([tensor[2] for tensor in tensors], np.uint8),
        tensor_flags=np.array([tensor[3] for tensor in tensors], np.uint8),
        tensor_ndim=np.array([len(tensor[4]) for tensor in tensors], np.uint8),
        tensor_shape=np.array(flat, np.int64),
        tensor_chunks=np.array([len(tensor[5]) for tensor in tensors], np.int64),
        chunk_offsets=np.array([number for offsets, _ in boxes for number in offsets], np.int64),
        chunk_sizes=np.array([number for _, sizes in boxes for number in sizes], np.int64),
        chunk_items=items(chunk_rows, blocks=blocks),
        object_names=[name for name, _ in objects],
        object_owner=np.array([owner for _, owner in objects], np.uint32),
        object_items=items(object_rows),
        alias_names=[name for name, _ in aliases],
        alias_targets=np.array([target for _, target in aliases], np.uint32),
        paths=paths,
        info=info,
        **tables,
    )


def rich_index():
    """An index with one of everything that stock can read as well."""
    big = 40 * 1024 * 1024
    return index(
        tensors=[
            ("model.w", 0, 0, 1, (4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 6))]),
            ("model.b", 0, 1, TensorFlags(memory_format=1, pin_memory=True).to_bits(), (3,), [((0,), (3,))]),
            ("step", 0, 2, 0, (), [((), ())]),
            ("empty", 0, 0, 0, (0, 5), [((0, 0), (0, 5))]),
            ("big", 0, 0, 0, (big,), [((0,), (big,))]),
            ("q", 0, 3, 0, (2,), [((0,), (2,))]),
        ],
        objects=[("opt.lr", 0), ("käse.ß", 0)],
        chunk_rows=[
            (0, 0, 300, 48, 200, Framing.RAW, 0, 0xDEADBEEF),
            (1, 0, 300, 48, 200, Framing.RAW, 0, 1),
            (0, 576, 320, 6, 202, Framing.RAW, 0, 2),
            (0, 1152, 310, 8, 200, Framing.RAW, 0, 3),
            (1, 576, 300, 0, 200, Framing.RAW, 0, 0),
            (1, 5_000_000_000, 340, 4 * big, 240, Framing.RAW, 0, 4),
            (1, 2048, 0, 1500, 0, Framing.TORCH_ZIP, 1, None),
        ],
        object_rows=[(0, 9000, 0, 700, 0, Framing.OBJECT, 0, 5), (1, 9000, 0, 70_000, 0, Framing.OBJECT, 0, 6)],
        aliases=[("tied", 0)],
        paths={
            "model.w": ("model", "w"),
            "model.b": ("model", "b"),
            "step": ("step",),
            "empty": ("empty",),
            "big": ("big",),
            "q": ("q",),
            "opt.lr": ("opt", "lr"),
            "käse.ß": ("käse", "ß"),
            "tied": ("tied",),
        },
        dtypes=("float32", "float16", "int64", "qint8"),
        files=("__0_0.0123456789abcdef.distcp", "sub/__1_0.0123456789abcdef.distcp"),
        chains=(("stream.zstd/1",),),
    )


def own_index():
    """An index with what only we can read: values of single ranks, raw items, keys that were numbers, odd paths."""
    return index(
        tensors=[
            ("t.5.0", 0, 0, 0, (2, 3), [((0, 0), (2, 3))]),
            ("rng", 1, 1, 0, (8,), [((0,), (8,))]),
            ("rng", 2, 1, 0, (8,), [((0,), (4,)), ((4,), (4,))]),
        ],
        objects=[("rng", 0), ("loader", 2)],
        chunk_rows=[
            (0, 0, 0, 12, 0, Framing.RAW, 0, 7),
            (0, 12, 0, 8, 0, Framing.RAW, 0, 7),
            (0, 64, 0, 4, 0, Framing.RAW, 0, 7),
            (0, 68, 0, 4, 0, Framing.RAW, 0, 7),
        ],
        object_rows=[(0, 100, 0, 30, 0, Framing.OBJECT, 0, 7), (0, 130, 0, 40, 0, Framing.OBJECT, 0, 7)],
        paths={"t.5.0": ("t", LiteralKey(5), 0), "rng": ("rng",), "loader": ("the", "loader"), "gone": ()},
        dtypes=("bfloat16", "uint8"),
        files=("__0_0.0123456789abcdef.distcp",),
    )


def blocked_index():
    """An index with a tensor that is stored plain, and one in encoded blocks."""
    return index(
        tensors=[
            ("plain", 0, 0, 0, (8,), [((0,), (8,))]),
            ("planes", 0, 0, 0, (9, 1000), [((0, 0), (4, 1000)), ((4, 0), (5, 1000))]),
        ],
        chunk_rows=[
            (0, 0, 0, 16, 0, Framing.RAW, 0, 7),
            (0, 64, 0, 7_000, 0, Framing.RAW, 1, 7),
            (0, 8192, 0, 9_000, 0, Framing.RAW, 1, 7),
        ],
        blocks=[None, encoded_blocks(8192, [7000]), encoded_blocks(4096, [3000, 4000, 2000])],
        dtypes=("bfloat16",),
        files=("__0_0.0123456789abcdef.distcp",),
        chains=(("block.planes/1",),),
    )


def same(one, other):
    """Assert that two indexes say the same, type by type."""
    for field in fields(CheckpointIndex):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, ItemColumns):
            assert isinstance(right, ItemColumns), field.name
            same_columns(field.name, left, right)
        elif isinstance(left, np.ndarray):
            same_column(field.name, left, right)
        else:
            assert left == right, field.name
    if one.paths is not None:
        kinds = [[type(part) for part in path] for path in one.paths.values()]
        assert kinds == [[type(part) for part in other.paths[name]] for name in one.paths]


def same_columns(name, left, right):
    """Assert that two tables are equal; one of them may be a part of another."""
    assert type(left) is type(right), name
    for column in () if left is None else fields(left):
        ours, theirs = getattr(left, column.name), getattr(right, column.name)
        (same_columns if column.name == "blocks" else same_column)(f"{name}.{column.name}", ours, theirs)


def same_column(name, left, right):
    assert left.dtype == right.dtype, name
    np.testing.assert_array_equal(left, right, err_msg=name)


NAMES = st.text(st.characters(codec="utf-8") | st.sampled_from(".\x00\ud800é0"), max_size=8)


@st.composite
def boxes_of(draw, shape):
    """A few boxes inside a shape, empty ones included."""
    boxes = []
    for _ in range(draw(st.integers(0, 4))):
        starts = [draw(st.integers(0, size)) for size in shape]
        sizes = [draw(st.integers(0, size - start)) for start, size in zip(starts, shape, strict=True)]
        boxes.append((tuple(starts), tuple(sizes)))
    return boxes


@st.composite
def item_rows(draw, framing, stored, chains):
    crc = draw(st.none() | st.integers(0, 2**32 - 1))
    lead, trail = draw(st.sampled_from([(0, 0), (300, 200), (301, 2**32 - 1), (2**32 - 1, 0)]))
    offset = draw(st.integers(0, 2**40) | st.integers(0, 300))
    return draw(st.integers(0, 2)), offset, lead, stored, trail, framing, draw(st.integers(0, chains)), crc


@st.composite
def random_indexes(draw):
    """Any index that a manifest can hold."""
    dtypes = tuple(draw(st.permutations(["float32", "bool", "complex128", "not_known_yet"])))
    chains = (("stream.zstd/1",), ("a", "b"))
    owners = st.sampled_from([0, 0, 0, 1, 7])
    values = draw(st.lists(st.tuples(NAMES, owners, st.booleans()), max_size=8, unique_by=lambda value: value[:2]))
    tensors, objects, chunk_rows, object_rows, blocks = [], [], [], [], []
    for name, owner, is_tensor in values:
        if not is_tensor:
            objects.append((name, owner))
            object_rows.append(draw(item_rows(Framing.OBJECT, draw(st.integers(0, 10**7)), 2)))
            continue
        shape = tuple(draw(st.lists(st.integers(0, 40) | st.sampled_from([2**20, 2**33]), max_size=4)))
        dtype = draw(st.integers(0, 3))
        boxes = draw(boxes_of([min(size, 2**12) for size in shape]))
        tensors.append((name, owner, dtype, draw(st.sampled_from([0, 1, 3, 5, 0x70])), shape, boxes))
        for _, sizes in boxes:
            raw = int(np.prod(sizes, dtype=object)) * ITEM_BYTES.get(dtypes[dtype], 3)
            framing = draw(st.sampled_from([Framing.RAW, Framing.RAW, Framing.TORCH_ZIP]))
            row = draw(item_rows(framing, min(raw, 2**36), 2))
            if row[6] == 0 and framing == Framing.RAW:
                row = (*row[:3], raw, *row[4:])
            if row[7] is not None and row[3] > 2**26:
                row = (*row[:7], None)  # keeps the running CRCs few
            encoded = None
            if framing == Framing.RAW and row[6] and row[7] is not None and 0 < raw <= 2**20 and draw(st.booleans()):
                step = draw(st.sampled_from([2**12, 2**16, 2**20]))
                lengths = draw(st.lists(st.integers(1, 9000), min_size=-(-raw // step), max_size=-(-raw // step)))
                encoded = encoded_blocks(step, lengths)
                row = (*row[:3], sum(lengths), *row[4:])
            chunk_rows.append(row)
            blocks.append(encoded)
    taken = {name for name, _, _ in values}
    spare = [name for name in ("x", "y.z") if name not in taken] if tensors else []
    aliases = [(name, draw(st.integers(0, len(tensors) - 1))) for name in spare]
    part = NAMES | st.integers(-(10**18) + 1, 10**18 - 1) | st.integers().map(lambda number: LiteralKey(str(number)))
    paths = draw(
        st.none()
        | st.just({name: (name,) for name in taken})
        | st.just({name: tuple(name.split(".")) for name in taken})
        | st.dictionaries(NAMES, st.lists(part, max_size=4).map(tuple), max_size=5)
    )
    made = index(
        tensors, objects, chunk_rows=chunk_rows, object_rows=object_rows, aliases=aliases, paths=paths,
        dtypes=dtypes, files=("a", "b/c", "dé"), chains=chains, blocks=blocks,
    )  # fmt: skip
    if draw(st.integers(0, 4)) == 0:
        made.chunk_items = made.object_items = None
    return made


@pytest.fixture(scope="session")
def make_index():
    return index


@pytest.fixture(scope="session")
def make_items():
    return items


@pytest.fixture(scope="session")
def assert_same():
    return same


@pytest.fixture(scope="session")
def indexes():
    """A hypothesis strategy."""
    return random_indexes()


@pytest.fixture
def rich():
    return rich_index()


@pytest.fixture
def own():
    return own_index()


@pytest.fixture
def blocked():
    return blocked_index()


@pytest.fixture(scope="session")
def rich_bytes():
    from dcp_manifest.file.manifest_write import encode

    return encode(rich_index())


@pytest.fixture(scope="session")
def own_bytes():
    from dcp_manifest.file.manifest_write import encode

    return encode(own_index())


@pytest.fixture(scope="session")
def stock():
    """Fake records under the names of stock's classes, and pickles of them."""
    return runpy.run_path(str(Path(__file__).with_name("stock_records.py")))["Stock"]
