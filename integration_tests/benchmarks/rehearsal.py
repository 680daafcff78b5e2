"""A rehearsed save beside a real one of the same tensors: `python -m integration_tests.benchmarks.rehearsal --help`.

Real ranks are processes of this machine. The rehearsal gets three rates that are measured here first: bytes per second
of as many processes that each save alone, seconds of a small file, and seconds of a request to the store.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_core import save
from dcp_core.records.metadata import TensorProperties
from dcp_core.shards.shards import LocalShard, LocalTensor
from dcp_core.testing.rehearsal.job import Job, Tensor
from dcp_core.testing.rehearsal.world import Cluster, World
from dcp_fs import FileSystemWriter
from dcp_ranks import store_of
from dcp_ranks.testing.ranks import RankPool
from dcp_ranks.transport.store_wire import innermost_store

__all__ = ["compare"]

TENSORS, COLUMNS = 32, 1024
TIMEOUT_SECONDS = 600.0


def shapes(ranks: int, mib: float) -> list[Tensor]:
    """Tensors of so many MiB on each rank."""
    rows = math.ceil(mib * 2**20 / (TENSORS * COLUMNS * 4))
    return [(f"layers.{number}.weight", (rows * ranks, COLUMNS), "float32") for number in range(TENSORS)]


def local_state(tensors: list[Tensor], rank: int, ranks: int) -> dict[str, Any]:
    """A rank's rows of each tensor."""
    state: dict[str, Any] = {}
    for name, (rows, columns), _ in tensors:
        part = torch.full((rows // ranks, columns), float(rank))
        shard = LocalShard(torch.Size((rank * len(part), 0)), part.shape, part.detach)
        size = torch.Size((rows, columns))
        state[name] = LocalTensor(size, TensorProperties(part.dtype), False, (shard,), shared=False)
    return state


def real_save(folder: Path, tensors: list[Tensor]) -> tuple[float, float, int]:
    """Save on this rank; return begin, end and bytes of its files."""
    rank = dist.get_rank()
    state = local_state(tensors, rank, dist.get_world_size())
    dist.barrier()
    begin = time.monotonic()
    save(state, storage_writer=FileSystemWriter(folder, thread_count=1))
    end = time.monotonic()
    return begin, end, sum(path.stat().st_size for path in folder.glob(f"__{rank}_*"))


def real_rates(folder: Path, tensors: list[Tensor]) -> tuple[float, float, float]:
    """Return seconds in which this rank saves its rows alone, those of a small file, and of a request to the store."""
    ranks = dist.get_world_size()
    state = {name: torch.full((rows // ranks, columns), 1.0) for name, (rows, columns), _ in tensors}
    place = folder / f"alone-{dist.get_rank()}"
    dist.barrier()
    begin = time.monotonic()
    save(state, storage_writer=FileSystemWriter(place, thread_count=1), no_dist=True)
    seconds = time.monotonic() - begin
    dist.barrier()
    begin = time.monotonic()
    for number in range(8):
        with open(place / f"small-{number}", "wb") as file:
            file.write(b"small")
            file.flush()
            os.fsync(file.fileno())
    small = (time.monotonic() - begin) / 8
    store = innermost_store(store_of(dist.distributed_c10d._get_default_group()))
    begin = time.monotonic()
    for _ in range(100):
        store.add("requests", 1)
    return seconds, small, (time.monotonic() - begin) / 100


def rehearsed_save(tensors: list[Tensor], cluster: Cluster) -> tuple[float, dict[int, int]]:
    """Return the virtual seconds of a save, and the bytes of each rank's files."""
    world = World(cluster)
    for task in Job(world, tensors).run():
        if task.error is not None:
            raise task.error
    sizes: dict[int, int] = {}
    for path, file in world.disk.files.items():
        name = path.rpartition("/")[2]
        if name.endswith(".distcp"):
            rank = int(name.split("_")[2])
            sizes[rank] = sizes.get(rank, 0) + file.size
    return max(end for *_, end in world.phases), sizes


def compare(pool: RankPool, ranks: int, mib: float, rounds: int) -> dict[str, Any]:
    """Save on real ranks and on virtual ones; return medians."""
    tensors, real, sizes, rates = shapes(ranks, mib), [], {}, []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            rates.append(pool.run(ranks, real_rates, folder, tensors, timeout_seconds=TIMEOUT_SECONDS))
            spans = pool.run(ranks, real_save, folder / "step-1", tensors, timeout_seconds=TIMEOUT_SECONDS)
        real.append(max(end for _, end, _ in spans) - min(begin for begin, *_ in spans))
        sizes = {rank: nbytes for rank, (*_, nbytes) in enumerate(spans)}
    slowest = [[max(each) for each in zip(*one, strict=True)] for one in rates]
    alone, small, request = (statistics.median(each) for each in zip(*slowest, strict=True))
    rate = sum(rows * columns * 4 for _, (rows, columns), _ in tensors) / alone
    cluster = Cluster(
        ranks,
        ranks,
        store_seconds=request / 2,
        disk_seconds=small / 2,  # a small file is created, and synced
        host_bytes_per_second=rate,
        disk_bytes_per_second=rate,
    )
    seconds, rehearsed_sizes = rehearsed_save(tensors, cluster)
    return {
        "ranks": ranks,
        "real_seconds": statistics.median(real),
        "rehearsed_seconds": seconds,
        "ratio": seconds / statistics.median(real),
        "bytes_per_second": rate,
        "small_file_seconds": small,
        "request_seconds": request,
        "equal_bytes": rehearsed_sizes == sizes,
    }


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4, 8), help="world sizes (default: %(default)s)")
    parser.add_argument("--mib", type=float, default=128.0, help="MiB of each rank (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="real saves (default: %(default)s)")
    options = parser.parse_args()
    pool = RankPool(max(options.ranks))
    try:
        print("| ranks | real | rehearsed | ratio | files |\n| ---: | ---: | ---: | ---: | --- |")
        for ranks in options.ranks:
            row = compare(pool, ranks, options.mib, options.rounds)
            files = "equal bytes" if row["equal_bytes"] else "other bytes"
            times = f"{row['real_seconds']:.2f} s | {row['rehearsed_seconds']:.2f} s | {row['ratio']:.2f}"
            print(f"| {ranks} | {times} | {files} |", flush=True)
            print({name: value for name, value in row.items() if "_second" in name})
    finally:
        pool.close()


if __name__ == "__main__":
    main()
