"""Loading from a disk whose pages are not held, beside plain reads of the very same files.

    python -m integration_tests.benchmarks.cold [--mib 1024] [--rounds 15] [--folder /tmp]

Where a file came to lie, and what a virtual machine's host keeps of it, weighs more than how it is read: contenders
that each read files of their own, as in the large benchmark, cannot be compared closely when they read cold.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import dcp_all as dcp
from integration_tests.benchmarks.folders import DEFAULT_PLACES, drop_cache, opened, settle

__all__ = ["measure"]

_TENSOR_BYTES = 16 << 20
_STEP_BYTES = 16 << 20


def measure(folder: Path, mib: int, rounds: int) -> dict[str, list[float]]:
    """Way of reading → seconds of each round; the ways in random order. One thread for each of two files.

    Pages can be dropped once they are written: the save is durable.
    """
    count = max(2, (mib << 20) // _TENSOR_BYTES)
    state = {f"t{number}": torch.randn(_TENSOR_BYTES // 2).bfloat16() for number in range(count)}
    checkpoint = folder / "checkpoint"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(checkpoint, thread_count=2))
    files = sorted(checkpoint.glob("*.distcp"))
    into = [torch.ones(file.stat().st_size, dtype=torch.uint8).numpy().data for file in files]
    ways: dict[str, Callable[[], object]] = {
        "preadv": lambda: _read(files, into),
        "ours": lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint, thread_count=2)),
        "ours, unverified": lambda: dcp.load(
            state, storage_reader=dcp.FileSystemReader(checkpoint, thread_count=2, verify=False)
        ),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name in random.sample(list(ways), len(ways)):
            drop_cache(checkpoint)
            start = time.perf_counter()
            ways[name]()
            if turn:
                taken[name].append(time.perf_counter() - start)
    return taken


def _read(files: Sequence[Path], into: Sequence[memoryview]) -> None:
    def one(file: Path, memory: memoryview) -> None:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            for offset in range(0, len(memory), _STEP_BYTES):
                piece = memory[offset : offset + _STEP_BYTES]
                if os.preadv(descriptor, [piece], offset) != len(piece):
                    raise RuntimeError(f"{file}: a read at byte {offset} ended early")
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(one, files, into))


def main() -> None:
    """Measure and print."""
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m integration_tests.benchmarks.cold", description=description)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state (default: 1024)")
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds; one more warms up (default: 15)")
    parser.add_argument(
        "--folder", default=DEFAULT_PLACES["disk"], help="on the disk to read from (default: %(default)s)"
    )
    arguments = parser.parse_args()
    with opened({"disk": arguments.folder}) as places:
        settle()  # what others wrote is not to be written back while reads are timed
        taken = measure(places["disk"], arguments.mib, arguments.rounds)
    print(f"{'':18} seconds (min-max)      ÷ preadv (median of pairs)")
    for name, seconds in taken.items():
        ratio = statistics.median(one / other for one, other in zip(seconds, taken["preadv"], strict=True))
        print(f"{name:18} {statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f})     {ratio:.2f}")


if __name__ == "__main__":
    main()
