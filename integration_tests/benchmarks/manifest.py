"""What the index of a large job costs: `python -m integration_tests.benchmarks.manifest`. Needs no torch.

256 ranks × 3,000 two-dimensional chunks, and 20,000 scalar tensors. CPU time (other work on the machine does not count
in it) and wall time, best of several.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from dcp_manifest import CheckpointIndex, read_index
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import ItemColumns, ManifestInfo, border_counts
from dcp_manifest.stock.stock_read import read_stock
from dcp_manifest.stock.stock_write import stock_head

RANKS, TENSORS, SCALARS, REPEATS = 256, 3_000, 20_000, 5
INFO = ManifestInfo("0123456789abcdef", RANKS, "benchmark")
T = TypeVar("T")


def best(label: str, call: Callable[[], T]) -> T:
    """Print the best CPU and wall time of a call; its result."""
    times = []
    for _ in range(REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, wall = (min(column) for column in zip(*times, strict=True))
    print(f"  {label:44} {cpu * 1e3:9.1f} ms CPU {wall * 1e3:9.1f} ms")
    return result


def items(
    rows: int, stored: int | np.ndarray, positions: np.ndarray, files: np.ndarray, *, framed: bool
) -> ItemColumns:
    """Item columns as a save leaves them, with random CRCs."""
    rng = np.random.default_rng(0)
    sizes = np.broadcast_to(np.asarray(stored, np.uint64), rows).copy()
    lead = np.full(rows, 318 * framed, np.uint32)
    return ItemColumns(
        file=files.astype(np.uint32),
        offset=positions.astype(np.uint64),
        length=lead + sizes + np.uint64(238 * framed),
        lead=lead,
        stored_bytes=sizes,
        framing=np.zeros(rows, np.uint8),
        chain=np.zeros(rows, np.uint8),
        checked=np.ones(rows, np.uint8),
        crc32=rng.integers(0, 2**32, rows, dtype=np.uint32),
        running_crcs=rng.integers(0, 2**32, int(border_counts(sizes).sum()), dtype=np.uint32),
    )


def none() -> ItemColumns:
    return items(0, 0, np.zeros(0), np.zeros(0), framed=False)


def sharded(grid: tuple[int, int]) -> CheckpointIndex:
    """3,000 tensors, each cut into a grid of 256 chunks."""
    rng = np.random.default_rng(0)
    sizes = np.stack([rng.integers(1, 64, TENSORS), rng.integers(1_000, 8_000, TENSORS)], 1)
    place = np.stack(np.unravel_index(np.arange(RANKS), grid), 1)
    stored = np.repeat(sizes.prod(1) * 4, RANKS)
    ends = np.cumsum((stored + 600).reshape(TENSORS, RANKS), 0)
    names = [f"model.layers.{n // 9}.attention.{n % 9}.weight" for n in range(TENSORS)]
    return CheckpointIndex(
        dtypes=("float32",),
        files=tuple(f"__{rank}_0.{INFO.save_id}.distcp" for rank in range(RANKS)),
        tensor_names=names,
        tensor_dtype=np.zeros(TENSORS, np.uint8),
        tensor_flags=np.zeros(TENSORS, np.uint8),
        tensor_ndim=np.full(TENSORS, 2, np.uint8),
        tensor_owner=np.zeros(TENSORS, np.uint32),
        tensor_shape=(sizes * grid).reshape(-1),
        tensor_chunks=np.full(TENSORS, RANKS),
        chunk_offsets=(place[None] * sizes[:, None]).reshape(-1),
        chunk_sizes=np.repeat(sizes, RANKS, axis=0).reshape(-1),
        chunk_items=items(
            TENSORS * RANKS, stored, (ends - ends[0]).reshape(-1), np.tile(np.arange(RANKS), TENSORS), framed=True
        ),
        object_items=none(),
        paths={name: ("model", name[6:]) for name in names},
        info=INFO,
    )


def scalars(*, framed: bool) -> CheckpointIndex:
    """Scalar tensors such as an optimizer's step counts."""
    names = [f"state.{n}.step" for n in range(SCALARS)]
    zeros = np.zeros(SCALARS, np.uint8)
    return CheckpointIndex(
        dtypes=("float32",),
        files=(f"__0_0.{INFO.save_id}.distcp",),
        tensor_names=names,
        tensor_dtype=zeros,
        tensor_flags=zeros,
        tensor_ndim=zeros,
        tensor_owner=zeros.astype(np.uint32),
        tensor_chunks=np.ones(SCALARS, np.int64),
        chunk_items=items(SCALARS, 4, np.arange(SCALARS) * (576 if framed else 4), zeros, framed=framed),
        object_items=none(),
        paths={name: ("state", number, "step") for number, name in enumerate(names)},
        info=INFO,
    )


def main() -> None:
    """Print the table."""
    for grid in ((RANKS, 1), (16, RANKS // 16)):
        index = sharded(grid)
        chunks = len(index.chunk_offsets) // 2
        borders = 4 * len(index.chunk_items.running_crcs) if index.chunk_items else 0
        print(f"{RANKS} ranks × {TENSORS:,} chunks, each tensor cut {grid[0]} × {grid[1]}")
        data = best("write, interop=False", lambda index=index: encode(index, interop=False))  # type: ignore[misc]
        best("read", lambda data=data: read_index(data, file="benchmark"))  # type: ignore[misc]
        head = best("head for stock", lambda index=index: stock_head(index))  # type: ignore[misc]
        print(f"  {(len(data) - borders) / chunks:.2f} bytes per chunk, {borders / chunks:.2f} more for running CRCs;")
        print(f"  {len(data):,} bytes; the head: {len(head) / chunks:.2f} bytes per chunk")
    for framed in (False, True):
        index = scalars(framed=framed)
        print(f"{SCALARS:,} scalar tensors, {'torch layout' if framed else 'raw layout, interop=False'}")
        data = best("write", lambda index=index, framed=framed: encode(index, interop=framed))  # type: ignore[misc]
        best("read", lambda data=data: read_index(data, file="benchmark"))  # type: ignore[misc]
        if framed:
            best("the head read as stock's", lambda data=data: read_stock(data, file="benchmark"))  # type: ignore[misc]
        print(f"  {len(data) / SCALARS:.1f} bytes per tensor")


if __name__ == "__main__":
    main()
