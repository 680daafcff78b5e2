"""Many saves into a keeper: neither descriptors, threads, mappings nor memory grow, of the keeper or of the trainer."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import dcp_all as dcp
from dcp_memory import keeper_status, stop_keeper
from dcp_memory.control import KeeperStatus
from integration_tests.memory.hosts import is_alive

RUN = "many-saves"
_MEMORY_KIB = 24 << 10
"""How much the private memory of a process may differ between two moments: allocators return it late."""
_SECONDS = 100.0


@pytest.fixture
def keepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of keepers of this test."""
    place = tmp_path / "keepers"
    monkeypatch.setenv("DCP_KEEPER_DIR", str(place))
    yield place
    stop_keeper(RUN, kill=True)


def status() -> KeeperStatus:
    found = keeper_status(RUN)
    assert found is not None
    return found


def counts(pid: int) -> dict[str, int]:
    """Descriptors, those of memory files, threads, and mappings of memory files of a process."""
    links = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(each))
        except FileNotFoundError:
            continue
    mapped = Path(f"/proc/{pid}/maps").read_text().count("memfd:dcp-keeper")
    return {
        "descriptors": len(links),
        "memory files": sum("memfd:" in link for link in links),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "mappings": mapped,
    }


def private_kib(pid: int) -> int:
    """Resident memory of a process that is not shared."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def settled(measure: Callable[[], object], wanted: object) -> object:
    """Measure until the result is the wanted one, which may take a moment; returns the last one."""
    until = time.monotonic() + _SECONDS
    while (found := measure()) != wanted and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    ("saver", "saves"),
    [
        ("thread", 50),
        pytest.param(None, 1000, marks=pytest.mark.slow),
        pytest.param("thread", 1000, marks=pytest.mark.slow),
        pytest.param("process", 1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_nothing_grows(keepers: Path, saver: str | None, saves: int) -> None:
    state = {f"w{number}": torch.full((1 << 16,), float(number)) for number in range(4)}
    tiers = dcp.Tiers([dcp.Tier(f"keeper://{RUN}", keep=dcp.KeepLast(2), per_host=True)])
    saving = dcp.AsyncSaver(saver) if saver else None
    warm_up = min(saves // 5, 100)
    try:
        with dcp.CheckpointManager(tiers, saver=saving) as manager:

            def save(step: int) -> None:
                state["w0"].fill_(float(step))
                manager.save(step, state)
                manager.wait()

            for step in range(1, warm_up + 1):
                save(step)
            processes = {"trainer": os.getpid(), "keeper": status().pid}
            if saving is not None and saver == "process":
                processes["worker"] = saving.backend.worker.pid  # type: ignore[attr-defined]

            def measure() -> dict[str, int]:
                now = status()
                kept = {"arenas": now.arenas, "bytes": now.arena_bytes + now.slab_bytes, "objects": now.objects}
                of_processes = {
                    f"{what} of {name}": n for name, pid in processes.items() for what, n in counts(pid).items()
                }
                return kept | of_processes

            def grown() -> dict[str, tuple[int, int]]:
                return {name: (before[name], now) for name, now in measure().items() if now > before[name]}

            before = measure()
            memory = {name: private_kib(pid) for name, pid in processes.items()}
            for step in range(warm_up + 1, saves + 1):
                save(step)
            assert settled(grown, {}) == {}
            for name, pid in processes.items():
                assert private_kib(pid) - memory[name] < _MEMORY_KIB, name
            template = {name: torch.zeros_like(value) for name, value in state.items()}
            manager.restore(template)
            assert all(torch.equal(template[name], value) for name, value in state.items())
    finally:
        if saving is not None:
            saving.close()
    pid = status().pid
    assert status().lent_bytes == 0
    assert stop_keeper(RUN)
    assert not is_alive(pid)
    assert [*keepers.iterdir()] == []
