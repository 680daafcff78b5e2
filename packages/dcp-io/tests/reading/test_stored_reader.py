"""Tensors put together from chunks that cannot be checked in parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dcp_io import LocalStore, crc32
from dcp_io.reading.stored_reader import StoredReader
from dcp_manifest import CorruptCheckpointError, StoredChunk, StoredItem
from dcp_manifest.index.columns import Framing


def halves(folder: Path, whole: np.ndarray, *, flipped: int | None) -> list[StoredChunk]:
    """Left and right half of a matrix as PyTorch stores them: each with one CRC for all its bytes."""
    columns = whole.shape[1] // 2
    chunks = []
    for number, half in enumerate((whole[:, :columns], whole[:, columns:])):
        data = bytearray(half.tobytes())
        item = StoredItem(f"{number}.distcp", 0, len(data), 0, len(data), Framing.RAW, crc32=crc32(data))
        if number == flipped:
            data[len(data) // 2] ^= 1
        (folder / item.file).write_bytes(data)
        chunks.append(StoredChunk("w", "float32", (0, number * columns), half.shape, item))
    return chunks


@pytest.mark.parametrize("max_bytes", [100_000, 64 << 20])
@pytest.mark.parametrize("flipped", [None, 0, 1])
def test_boxes_of_columns_are_checked(tmp_path: Path, flipped: int | None, max_bytes: int) -> None:
    whole = np.arange(4096 * 64, dtype=np.float32).reshape(4096, 64)
    chunks = halves(tmp_path, whole, flipped=flipped)
    pieces = StoredReader(LocalStore(tmp_path)).tensor("float32", whole.shape, chunks).pieces(max_bytes)
    if flipped is None:
        assert b"".join(map(bytes, pieces)) == whole.tobytes()
        return
    with pytest.raises(CorruptCheckpointError, match=f"{flipped}.distcp"):
        next(pieces)
