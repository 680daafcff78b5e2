from __future__ import annotations

import numpy as np
import pytest

from dcp_manifest import CheckpointIndex, UnsupportedFormatError
from dcp_manifest.file.manifest_write import encode, narrow
from dcp_manifest.index.columns import ItemColumns, ManifestInfo, border_counts

RANKS, TENSORS = 256, 3_000


def sharded(dims, *, framed):
    """3,000 tensors of two dimensions over 256 ranks: by rows (1 dim sharded) or by blocks (2 dims)."""
    rng = np.random.default_rng(0)
    chunks = TENSORS * RANKS
    grid = (RANKS, 1) if dims == 1 else (16, 16)
    sizes = np.stack([rng.integers(1, 40, TENSORS), rng.integers(1000, 5000, TENSORS)], 1)
    place = np.stack(np.unravel_index(np.arange(RANKS), grid), 1)
    offsets = (place[None] * sizes[:, None]).reshape(-1)
    stored = np.repeat(sizes.prod(1) * 4, RANKS).astype(np.uint64)
    lead = np.repeat(rng.integers(300, 330, TENSORS), RANKS).astype(np.uint32) * framed
    length = lead + stored + np.uint64(220 * framed)
    position = np.concatenate([np.zeros((1, RANKS), np.uint64), np.cumsum(length.reshape(TENSORS, RANKS), 0)[:-1]])
    items = ItemColumns(
        file=np.tile(np.arange(RANKS, dtype=np.uint32), TENSORS),
        offset=position.reshape(-1),
        length=length,
        lead=lead,
        stored_bytes=stored,
        framing=np.zeros(chunks, np.uint8),
        chain=np.zeros(chunks, np.uint8),
        checked=np.ones(chunks, np.uint8),
        crc32=rng.integers(0, 2**32, chunks, dtype=np.uint32),
        running_crcs=rng.integers(0, 2**32, int(border_counts(stored).sum()), dtype=np.uint32),
    )
    names = [f"model.layers.{n}.weight" for n in range(TENSORS)]
    return CheckpointIndex(
        dtypes=("float32",),
        files=tuple(f"__{rank}_0.0123456789abcdef.distcp" for rank in range(RANKS)),
        tensor_names=names,
        tensor_dtype=np.zeros(TENSORS, np.uint8),
        tensor_flags=np.zeros(TENSORS, np.uint8),
        tensor_ndim=np.full(TENSORS, 2, np.uint8),
        tensor_owner=np.zeros(TENSORS, np.uint32),
        tensor_shape=(sizes * grid).reshape(-1),
        tensor_chunks=np.full(TENSORS, RANKS),
        chunk_offsets=offsets,
        chunk_sizes=np.repeat(sizes, RANKS, axis=0).reshape(-1),
        chunk_items=items,
        paths={name: ("model", name[6:]) for name in names},
        info=ManifestInfo("0123456789abcdef", RANKS, "test"),
    )


@pytest.mark.parametrize(("dims", "framed", "budget"), [(1, True, 16), (2, True, 20), (1, False, 15), (2, False, 19)])
def test_bytes_per_chunk(dims, framed, budget):
    index = sharded(dims, framed=framed)
    borders = 4 * len(index.chunk_items.running_crcs)
    assert (len(encode(index, interop=False)) - borders) / (RANKS * TENSORS) <= budget


def test_bytes_per_chunk_with_the_widest_numbers():
    """Every file over 4 GiB, every size and offset over 65,535: still within 32 bytes."""
    index = sharded(2, framed=True)
    index.chunk_items.offset += np.uint64(2**32)
    index.tensor_shape *= 2**10
    index.chunk_offsets *= 2**10
    index.tensor_shape[0:2] = 2**27
    index.chunk_sizes[0:2] = 2**17
    index.chunk_items.stored_bytes[0] = 2**36
    index.chunk_items.length[0] = 2**36 + 520
    index.chunk_items.running_crcs = np.arange(
        int(border_counts(index.chunk_items.stored_bytes).sum()), dtype=np.uint32
    )
    borders = 4 * len(index.chunk_items.running_crcs)
    assert (len(encode(index, interop=False)) - borders) / (RANKS * TENSORS) <= 32


def test_bytes_per_scalar(make_index):
    count = 20_000
    names = [f"state.{n}.step" for n in range(count)]
    index = make_index(
        [(name, 0, 0, 0, (), [((), ())]) for name in names],
        chunk_rows=[(0, 4 * n, 0, 4, 0, 0, 0, n * 2654435761 % 2**32) for n in range(count)],
        paths={name: tuple(name.split(".")) for name in names},
        dtypes=("float32",),
        files=("__0_0.0123456789abcdef.distcp",),
    )
    assert len(encode(index, interop=False)) / count <= 30


@pytest.mark.parametrize(("ndim", "chunks"), [(0, 20_000), (64, 5_000)])
def test_more_equal_rows_than_readers_accept_are_refused(make_index, ndim, chunks):
    zeros = (0,) * ndim
    index = make_index(
        [("t", 0, 0, 0, zeros, [(zeros, zeros)] * chunks)],
        chunk_rows=[(0, 0, 0, 0 if ndim else 4, 0, 0, 0, 1)] * chunks,
        dtypes=("float32",),
        files=("a",),
    )
    with pytest.raises(UnsupportedFormatError, match="more equal rows"):
        encode(index)


@pytest.mark.parametrize(
    ("values", "dtype", "count"),
    [
        ([], "uint8", 0),
        ([0], "uint8", 1),
        ([255, 0], "uint8", 2),
        ([256, 0], "uint16", 2),
        ([65536, 0], "uint32", 2),
        ([2**32, 0], "uint64", 2),
        ([7, 7], "uint8", 1),
        ([7, 7, 7], "uint8", 1),
    ],
)
def test_narrow(values, dtype, count):
    column = narrow(np.array(values, np.uint64))
    assert (column.dtype, len(column)) == (np.dtype(dtype), count)
    assert np.array_equal(np.resize(column, len(values)), values)


def test_equal_rows_may_be_kept():
    assert len(narrow(np.array([7, 7]), collapse=False)) == 2
