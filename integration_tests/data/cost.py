"""What indices cost: `ResumableSampler` beside torch's `DistributedSampler`, each in a process of its own.

`python -m integration_tests.data.cost` prints medians of five runs (three of the longest) on rank 3 of 8, with 32
samples in each of its batches: the time to the first batch, the time for each sample of this rank after it, the memory
that the process gains, and the time to the first batch after a resume in the middle of the epoch, where a plain sampler
skips what was consumed.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from dcp_data import ResumableSampler

RANKS, RANK, BATCH = 8, 3, 32
BATCHES = 3000
RUNS = 5


def of_torch(length: int, consumed: int) -> Iterator[list[int]]:
    sampler: DistributedSampler[int] = DistributedSampler(range(length), RANKS, RANK)
    return itertools.islice(BatchSampler(sampler, BATCH, drop_last=True), consumed // (BATCH * RANKS), None)


def ours(length: int, consumed: int) -> Iterator[list[int]]:
    sampler = ResumableSampler(length, BATCH * RANKS, rank=RANK, world_size=RANKS)
    sampler.load_state_dict({**sampler.state_dict(), "samples_in_epoch": consumed})
    return iter(sampler)


KINDS = {"DistributedSampler": of_torch, "ResumableSampler": ours}


def measure(kind: str, length: int) -> dict[str, float]:
    """Seconds, and MiB of memory at the highest."""
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    batches = KINDS[kind](length, 0)
    next(batches)
    first = time.perf_counter() - begin
    count = min(BATCHES, length // (BATCH * RANKS) - 1)
    begin = time.perf_counter()
    consume(itertools.islice(batches, count))
    each = (time.perf_counter() - begin) / (count * BATCH)
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    del batches
    begin = time.perf_counter()
    next(KINDS[kind](length, length // (2 * BATCH * RANKS) * BATCH * RANKS))
    return {"first s": first, "sample ns": each * 1e9, "MiB": memory, "resume s": time.perf_counter() - begin}


def consume(batches: Iterable[list[int]]) -> None:
    for _ in batches:
        pass


def main() -> None:
    for length in (10**6, 10**7, 10**8):
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _ in range(RUNS if length < 10**8 else 3):
            for kind, results in found.items():  # in turns
                command = [sys.executable, "-m", "integration_tests.data.cost", kind, str(length)]
                printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                results.append(json.loads(printed))
        for kind, results in found.items():
            medians = {name: statistics.median(each[name] for each in results) for name in results[0]}
            print(f"{length:>11,} {kind:20}", *(f"{name} {value:10.4g}" for name, value in medians.items()), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
