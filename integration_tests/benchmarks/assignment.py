"""What assigning a cooperative load costs: `python -m integration_tests.benchmarks.assignment`.

The demands of 1,024 ranks with 3,000 rows each, on 128 hosts. Each case runs in a process of its own, whose memory
before is subtracted; the demands themselves are shown beside.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from dcp_exchange.assignment.assign import Assignment, assign
from dcp_io.reading.crc_checks import Demands

RANKS, ROWS, PER_HOST = 1024, 3000, 8
BLOCK, MIB = 256 << 10, 1 << 20
Groups = list[tuple[Demands, Sequence[int]]]


def rows(name: str, starts: np.ndarray, size: int) -> Demands:
    count = len(starts)
    return Demands((name,), np.zeros(count, np.int32), starts, starts + size, np.full(count, BLOCK))


def equal() -> Groups:
    return [(rows("a", np.arange(ROWS) * 4 * MIB, 3 * MIB), range(RANKS))]


def hybrid() -> Groups:
    """HSDP 128 × 8: eight shards, each on 128 ranks."""
    return [(rows(f"{shard}", np.arange(ROWS) * 4 * MIB, 3 * MIB), range(shard, RANKS, 8)) for shard in range(8)]


def columns() -> Groups:
    """Shards by columns: the 8 ranks of a group want all blocks of their tensors."""
    return [(rows(f"{low:04}", np.arange(ROWS) * 4 * MIB, 3 * MIB), range(low, low + 8)) for low in range(0, RANKS, 8)]


def distinct() -> Groups:
    """Shards by rows: neighbours share the block at their border, so that 3,069,000 blocks are wanted twice."""
    step = np.arange(ROWS) * (4 * RANKS * BLOCK)
    return [(rows("a", step + (4 * rank - (rank > 0)) * BLOCK, 5 * BLOCK), [rank]) for rank in range(RANKS)]


def nested() -> Groups:
    """Half of the ranks want all in one row each, which those of the other half cut into 1,536,000 blocks."""
    half, total = RANKS // 2, ROWS * RANKS // 2 * BLOCK
    fine = [(rows("a", (np.arange(ROWS) * half + rank) * BLOCK, BLOCK), [rank]) for rank in range(half)]
    whole = [(rows("a", np.zeros(1, np.int64), total - rank * BLOCK), [rank]) for rank in range(half, RANKS)]
    return [*fine, *whole]


def sliding() -> Groups:
    """Windows that slide from rank to rank: 6,141,000 stretches in sets of up to 1,024 ranks."""
    return [(rows("a", (np.arange(ROWS) * 2 * RANKS + rank) * BLOCK, RANKS * BLOCK), [rank]) for rank in range(RANKS)]


def scattered() -> Groups:
    """Random windows: each rank wants one of a random size somewhere in each of 3,000 ranges."""
    maker, width = np.random.default_rng(7), 2 * RANKS
    groups: Groups = []
    for rank in range(RANKS):
        ends = np.sort(maker.integers(0, width, (ROWS, 2)), axis=1)
        ends[:, 1] += ends[:, 0] == ends[:, 1]
        starts, stops = (ends + np.arange(ROWS)[:, None] * (width + 1)).T * BLOCK
        zeros, grains = np.zeros(ROWS, np.int32), np.full(ROWS, BLOCK)
        groups.append((Demands(("a",), zeros, starts.copy(), stops.copy(), grains), [rank]))
    return groups


CASES: dict[str, Callable[[], Groups]] = {
    each.__name__: each for each in (equal, hybrid, columns, distinct, nested, sliding, scattered)
}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m integration_tests.benchmarks.assignment", description=__doc__)
    parser.add_argument("--case", action="append", choices=[*CASES], default=[])
    chosen = parser.parse_args(given).case or [*CASES]
    print("| case | seconds of processor | peak MB | MB of demands | pieces | fullest rank ÷ mean |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in chosen:
        child = os.fork()
        if child == 0:
            print(measure(name), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"{name}: failed")


def measure(name: str) -> str:
    groups = CASES[name]()
    hosts = [rank // PER_HOST for rank in range(RANKS)]
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before, began = memory("VmRSS"), time.process_time()
    found = assign(groups, hosts)
    seconds, peak = time.process_time() - began, memory("VmHWM") - before
    demands = sum(each.starts.nbytes * 3 + each.objects.nbytes for each, _ in groups) / 1e6
    numbers = f"{seconds:.2f} | {peak:.0f} | {demands:.0f} | {len(found.starts):,} | {fullest(found, groups):.3f}"
    return f"| {name} | {numbers} |"


def memory(field: str) -> float:
    """A field of this process's status, MB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 / 1e6 for line in file if line.startswith(field))


def fullest(found: Assignment, groups: Groups) -> float:
    """Bytes that the fullest rank reads, for others and itself, by the mean."""
    sizes = found.stops - found.starts
    loads = np.zeros(RANKS, np.int64)
    for demands, ranks in groups:
        loads[list(ranks)] = demands.total_bytes
    per_class = np.zeros(len(found.borders) - 1, np.int64)
    np.add.at(per_class, found.classes, sizes)
    np.subtract.at(loads, found.readers, np.repeat(per_class, np.diff(found.borders)))
    loads = np.maximum(loads, 0)  # where sets were joined, ranks get more than they want
    np.add.at(loads, found.owners, sizes)
    return float(loads.max() / loads.mean())


if __name__ == "__main__":
    main()
