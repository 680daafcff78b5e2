"""Memory of the joined items of many ranks."""

import tracemalloc

import numpy as np

from dcp_manifest.index.columns import CHUNKS_AT_ONCE, ItemColumns
from dcp_manifest.index.stored_items import StoredItems

RANKS = 128
ITEMS = CHUNKS_AT_ONCE // RANKS + 8


def items_of(rank: int) -> StoredItems:
    """Items of one rank as it sends them: of two blocks, with one border between them."""
    sizes = np.full(ITEMS, 1 << 17, np.uint32)
    sizes[0] = 1 << 16  # without a border
    none, ones = np.zeros(ITEMS, np.uint8), np.ones(ITEMS, np.uint8)
    crcs = np.arange(ITEMS, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(rank)
    offsets = np.arange(ITEMS, dtype=np.uint32) << 17
    columns = ItemColumns(none, offsets, sizes, none, sizes, none, none, ones, crcs, crcs[1:])
    return StoredItems(columns, [f"{rank}.bin"])


def test_many_joined_items_hold_few_bytes_each() -> None:
    parts = [items_of(rank) for rank in range(RANKS)]
    order = np.arange(RANKS * ITEMS, dtype=np.uint32).reshape(RANKS, ITEMS).T.ravel()  # by tensor, not by rank
    tracemalloc.start()
    try:
        columns = StoredItems.joined(parts, order).columns
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 18.5 * len(order), "bytes per chunk: 4 of each CRC, of the size and the offset, 1 of the file"
    assert columns.file.tolist() == list(range(RANKS)) * ITEMS
    assert (
        columns.length.tolist() == columns.stored_bytes.tolist() == [1 << 16] * RANKS + [1 << 17] * RANKS * (ITEMS - 1)
    )
    assert columns.checked.tolist() == [1] * len(order)
    assert columns.crc32.tolist() == [
        crc for row in zip(*(p.columns.crc32.tolist() for p in parts), strict=True) for crc in row
    ]
    assert columns.running_crcs.tolist() == columns.crc32.tolist()[RANKS:]
