from __future__ import annotations

import pytest

from dcp_manifest.index.columns import Framing, TensorFlags, border_count


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4, 8, 9, 0x10, 0x70, 0x7B])
def test_flags_survive_as_bits(bits):
    assert TensorFlags.from_bits(bits).to_bits() == bits


@pytest.mark.parametrize("bits", [-1, 12, 0x80, 0xFF, 256])
def test_bits_that_no_flags_have_are_refused(bits):
    with pytest.raises(ValueError, match="not valid"):
        TensorFlags.from_bits(bits)


def test_starts(rich):
    assert rich.chunk_starts().tolist() == [0, 2, 3, 4, 5, 6, 7]
    assert rich.shape_starts().tolist() == [0, 2, 3, 3, 5, 6, 7]
    assert rich.box_starts().tolist() == [0, 4, 5, 5, 7, 8, 9]
    starts, blocks = rich.ragged_starts(rich.chunk_items)
    assert blocks == []
    assert starts == [0, 0, 0, 0, 0, 0, border_count(160 * 1024**2), border_count(160 * 1024**2)]


@pytest.mark.parametrize("given_starts", [True, False])
def test_an_item_as_a_record(rich, given_starts):
    starts = rich.ragged_starts(rich.chunk_items) if given_starts else None
    item = rich.stored_item(rich.chunk_items, 5, starts)
    assert (item.file, item.offset, item.lead, item.framing) == (rich.files[1], 5_000_000_000, 340, Framing.RAW)
    assert (item.crc32, item.chain) == (4, ())
    assert item.length == 340 + item.stored_bytes + 240
    assert item.running_crcs.tolist() == rich.chunk_items.running_crcs.tolist()
    stocks = rich.stored_item(rich.chunk_items, 6)
    assert (stocks.crc32, stocks.running_crcs, stocks.chain) == (None, None, ("stream.zstd/1",))
