"""What a cooperative load leaves behind, which is nothing, and the memory that it needs meanwhile."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import dcp_all as dcp
from dcp_exchange.arena import Arena
from dcp_ranks.testing.ranks import RankPool
from integration_tests.exchange.counting import hosts_of

MIB = 1 << 20
# Of the interpreter and of allocators: threads' stacks, plans, arenas of malloc.
SLACK_MIB = 16


def status(field: str) -> float:
    """Return a field of this process's status, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def held() -> tuple[int, int]:
    """Return the numbers of descriptors and of threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def no_more_than(before: tuple[int, int]) -> tuple[int, int]:
    """Return `held()`, as soon as it is at most what it was before; those of earlier tests may end meanwhile."""
    deadline = time.monotonic() + 100
    while any(now > then for now, then in zip(held(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return held()


def load_often(folder: str, loads: int, ranks_of_host: int) -> Any:
    """Return descriptors, threads and private memory (MiB) before and after so many loads."""
    template = {"w": torch.zeros(MIB)}
    with hosts_of(ranks_of_host):

        def load() -> None:
            assert dcp.load(template, checkpoint_id=folder, cooperative=True).cooperative

        for _ in range(5):
            load()
        before, memory = held(), status("RssAnon")
        for _ in range(loads):
            load()
        return before, no_more_than(before), status("RssAnon") - memory


@pytest.mark.parametrize(
    ("loads", "ranks_of_host"), [(10, 2), pytest.param(100, 4, marks=pytest.mark.slow)], ids=["10", "100"]
)
def test_loads_leave_nothing_behind(ranks: RankPool, tmp_path: Path, loads: int, ranks_of_host: int) -> None:
    dcp.save({"w": torch.arange(float(MIB))}, checkpoint_id=tmp_path, no_dist=True)
    for before, after, grown in ranks.run(4, load_often, str(tmp_path), loads, ranks_of_host):
        assert after[0] <= before[0], "descriptors"
        assert after[1] <= before[1], "threads"
        assert grown <= SLACK_MIB


def load_once(folder: str, mib: int, ranks_of_host: int) -> tuple[float, float]:
    """Return the private memory beyond the tensors, at its peak, and the size of the arena; MiB."""
    template = {f"w{n}": torch.zeros(mib * MIB // 4 // 8) for n in range(8)}
    arenas: list[float] = []
    close, peak, ended = Arena.close, [0.0], threading.Event()

    def note(arena: Arena) -> None:
        arenas.append(os.fstat(arena.descriptor).st_blocks * 512 / MIB)
        close(arena)

    def watch() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], status("RssAnon"))

    with hosts_of(ranks_of_host), mock.patch.object(Arena, "close", note):
        dcp.load(template, checkpoint_id=folder, cooperative=True)  # modules, allocators
        arenas.clear()
        before = status("RssAnon")
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            dcp.load(template, checkpoint_id=folder, cooperative=True)
        finally:
            ended.set()
            watcher.join()
    assert torch.equal(template["w7"], torch.arange(float(mib * MIB // 4 // 8)) + 7)
    return peak[0] - before, sum(arenas)


@pytest.mark.parametrize("ranks_of_host", [4, 2], ids=["one host", "two hosts"])
@pytest.mark.parametrize("mib", [128, pytest.param(1024, marks=pytest.mark.slow)])
def test_memory_beyond_the_tensors(ranks: RankPool, tmp_path: Path, mib: int, ranks_of_host: int) -> None:
    size = mib * MIB // 4 // 8
    dcp.save({f"w{n}": torch.arange(float(size)) + n for n in range(8)}, checkpoint_id=tmp_path, no_dist=True)
    found = ranks.run(4, load_once, str(tmp_path), mib, ranks_of_host)
    for private, shared in found:
        assert shared <= 64
        assert private + shared <= 64 + SLACK_MIB
    assert sum(shared for _, shared in found) > 0  # a rank that gets no processor time may be relieved of all
