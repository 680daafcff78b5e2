"""`run_ranks`: real ranks that carry out a `Task`, on this machine or on pretended hosts; the program of one rank."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader as stock
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import dcp_all as dcp
from dcp_io import crc32
from integration_tests.benchmarks.cooperative.tasks import MIB, Taken, Task, fill_state, make_template
from integration_tests.benchmarks.cooperative.throttle import ThrottledReader, TokenBucket
from integration_tests.benchmarks.folders import drop_cache
from integration_tests.benchmarks.rank_jobs import run_job
from integration_tests.kits.networks import NetworkHost

__all__ = ["run_ranks"]

_COOPERATIVE: Mapping[str, bool | None] = {"together": True, "alone": False, "chosen": None}
_MODULE = "integration_tests.benchmarks.cooperative.ranks"
_STEP_BYTES = 4 * MIB
_SOURCE_BYTES = 64 * MIB


def run_ranks(
    task: Task, ranks: int, hosts: Sequence[NetworkHost] = (), environment: Mapping[str, str] | None = None
) -> dict[str, Taken]:
    """Carry out a task on so many ranks.

    Args:
        task: The task.
        ranks: Number of ranks.
        hosts: Pretended hosts to which the ranks go in equal parts; none for this machine's own network.
        environment: Variables for the ranks.

    Raises:
        RuntimeError: A rank failed; with what it printed.
    """
    variables = {} if environment is None else environment
    told = run_job(_MODULE, dataclasses.asdict(task), ranks, hosts, lambda _: variables)
    state_bytes = task.mib * MIB
    return {
        name: Taken.of([[each[name][turn] for each in told] for turn in range(rounds)], state_bytes)
        for name, rounds in task.rounds.items()
    }


def main(given: Sequence[str]) -> None:
    """Be one rank: carry out the task, and print what it took."""
    task = Task(**json.loads(given[0]))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    template = make_template(task.mib)
    ways = {name: _make_way(name, task, template) for name in task.rounds}
    taken: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in ways}
    for turn in range(1 + max(task.rounds.values())):
        names = [name for name, rounds in task.rounds.items() if turn <= rounds]
        for name in random.Random(turn).sample(names, len(names)):  # the same order on all ranks
            found = _measure(ways[name], task, template, check=turn == 0 and name != "floor")
            if turn:
                taken[name].append(found)
    dist.destroy_process_group()
    print(json.dumps(taken))


def _measure(
    way: Callable[[], float], task: Task, template: dict[str, torch.Tensor], *, check: bool
) -> tuple[float, float, float, float]:
    if task.cold and dist.get_rank() == 0:
        drop_cache(Path(task.place))
    if check:
        for value in template.values():
            value.zero_()
    dist.barrier()
    begin, cpu = time.monotonic(), _cpu_seconds()
    read = way()
    found = begin, time.monotonic(), _cpu_seconds() - cpu, read
    if check and any(not torch.equal(template[key], value) for key, value in fill_state(task.mib).items()):
        raise RuntimeError("a load did not bring what was saved")
    return found


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _make_way(name: str, task: Task, template: dict[str, torch.Tensor]) -> Callable[[], float]:
    """Return the function that loads in one way, and returns the bytes that it took from the storage, if it counts."""
    if name == "stock":
        return lambda: stock.load(template, storage_reader=FsspecReader(task.place)) or 0.0
    if name == "floor":
        return _Floor(task.place, template)
    peers = dcp.PeerOptions(network=task.network) if task.network else None
    buckets: list[TokenBucket] = []
    if task.storage == "throttled":
        buckets.append(TokenBucket(f"{task.place}.limit", task.bytes_per_second))
        if task.slow_bytes_per_second and dist.get_rank() == dist.get_world_size() - 1:
            buckets.append(TokenBucket(f"{task.place}.slow", task.slow_bytes_per_second))

    def load() -> float:
        reader: Any
        if task.storage == "throttled":
            reader = ThrottledReader(task.place, buckets)
        else:
            reader = (
                dcp.ObjectStoreReader(task.place) if task.storage == "objects" else dcp.FileSystemReader(task.place)
            )
        report = dcp.load(template, storage_reader=reader, peers=peers, cooperative=_COOPERATIVE[name])
        return float(report.bytes_read)

    return load


class _Floor:
    """The least that a common load can do: each rank reads and checks its share, and copies the whole state.

    One `preadv` and one CRC pass of the unique bytes, and one copy into the touched tensors of each rank, from as
    much memory as an arena may have, whose pages exist; no names, no index, no plan, no messages.
    """

    def __init__(self, folder: str, template: dict[str, torch.Tensor]) -> None:
        self._files = sorted(Path(folder).glob("*.distcp"))
        self._targets = [value.numpy().view(np.uint8) for value in template.values()]
        self._source = np.ones(_SOURCE_BYTES, np.uint8)

    def __call__(self) -> float:
        read, piece = 0, self._source[:_STEP_BYTES].data
        for file in self._files:
            descriptor = os.open(file, os.O_RDONLY)
            starts = range(0, os.fstat(descriptor).st_size, _STEP_BYTES)
            for start in starts[dist.get_rank() :: dist.get_world_size()]:
                count = os.preadv(descriptor, [piece], start)
                crc32(piece[:count])
                read += count
            os.close(descriptor)
        for target in self._targets:
            for start in range(0, len(target), _SOURCE_BYTES):
                part = target[start : start + _SOURCE_BYTES]
                part[:] = self._source[: len(part)]
        return float(read)


if __name__ == "__main__":
    main(sys.argv[1:])
