from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_manifest import StoredItem
from dcp_manifest.index.columns import EncodedBlocks, Framing, ItemKind, block_bytes, border_count, border_counts
from dcp_manifest.index.stored_items import StoredItems

KIB, MIB = 1024, 1024**2


@pytest.mark.parametrize(
    ("stored", "block", "borders"),
    [
        (0, 64 * KIB, 0),
        (1, 64 * KIB, 0),
        (64 * KIB, 64 * KIB, 0),
        (64 * KIB + 1, 64 * KIB, 1),
        (2 * MIB, 64 * KIB, 31),
        (2 * MIB + 1, 68 * KIB, 30),
        (16 * MIB, 512 * KIB, 31),
        (32 * MIB, MIB, 31),
        (100 * MIB, MIB, 99),
    ],
)
def test_blocks(stored, block, borders):
    assert (block_bytes(stored), border_count(stored)) == (block, borders)


@given(st.lists(st.integers(0, 2**62 - 1) | st.integers(0, 2**27)))
def test_many_at_once_as_one_by_one(sizes):
    assert border_counts(np.array(sizes, np.uint64)).tolist() == [border_count(size) for size in sizes]


BLOCKS = EncodedBlocks(8, np.array([4], np.uint32), np.array([7], np.uint32))


@pytest.mark.parametrize(
    ("framing", "chain", "blocks", "kind"),
    [
        (Framing.RAW, (), None, ItemKind.RAW),
        (Framing.RAW, ("a",), BLOCKS, ItemKind.BLOCKS),
        (Framing.RAW, ("a",), None, ItemKind.STREAM),
        (Framing.TORCH_ZIP, (), None, ItemKind.ARCHIVE),
        (Framing.TORCH_ZIP, ("a", "b"), None, ItemKind.STREAM),
        (Framing.OBJECT, (), None, ItemKind.ARCHIVE),
        (Framing.OBJECT, ("b",), None, ItemKind.STREAM),
    ],
)
def test_records_and_columns_agree_on_the_kind(framing, chain, blocks, kind):
    item = StoredItem("f", 0, 4, 0, 4, framing, 1, chain=chain, blocks=blocks)
    plain = StoredItem("f", 4, 4, 0, 4, Framing.RAW)
    assert item.kind is kind
    assert StoredItems.of([item, plain]).columns.kinds().tolist() == [kind, ItemKind.RAW]
