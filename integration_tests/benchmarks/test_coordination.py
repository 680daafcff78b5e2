"""The formulas of `docs/planning.md` for connections and requests, on simulated ranks with real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dcp_ranks import make_coordinator, store_of
from dcp_ranks.transport.store_wire import innermost_store
from integration_tests.benchmarks.coordination import FINGERPRINT_BYTES, RANKS_PER_HOST, Setting, measure

PAGE = (Path(__file__).parents[2] / "docs/planning.md").read_text()


def formula(row: str, *, leaders: bool, ranks: int) -> int:
    """The last number of a table's cell, for so many ranks."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]
    text = re.findall("`(.+?)`", line.split("|")[3 if leaders else 2])[0]
    return int(eval(text, {"N": ranks, "h": RANKS_PER_HOST, "V": FINGERPRINT_BYTES}))


def check(ranks: int, load: dict[str, dict[str, int]], *, leaders: bool) -> None:
    same, each, sockets = (load[name] for name in ("fingerprints", "plans", "sockets"))

    def expected(row: str) -> int:
        return formula(row, leaders=leaders, ranks=ranks)

    if leaders:
        assert same["all"] <= expected("requests to the store, all ranks, same")
        assert each["all"] <= expected("requests to the store, all ranks, an")
        assert same["coordinator"] <= expected("requests of the coordinator")
        assert FINGERPRINT_BYTES * ranks < same["came"] <= expected("bytes from the ranks")
    else:
        assert same["all"] == expected("requests to the store, all ranks, same")
        assert each["all"] == expected("requests to the store, all ranks, an")
        assert same["coordinator"] == expected("requests of the coordinator")
        assert FINGERPRINT_BYTES * ranks < same["bytes"] <= expected("bytes from the ranks")
    assert max(same["other"], each["other"]) <= expected("requests of another rank")
    assert 0 < sockets["coordinator"] <= expected("sockets of the coordinator")
    assert 0 < sockets["other"] <= expected("sockets of another rank")


@pytest.mark.parametrize("leaders", [False, True])
def test_the_formulas_hold(leaders: bool) -> None:
    (result,) = measure([Setting(32, leaders, rounds=1, plan_bytes=3_000)], 2)
    check(32, result.load, leaders=leaders)


def test_the_command_imports_pytorch_in_one_process_that_it_copies() -> None:
    options = ("--ranks", "2", "--processes", "3", "--rounds", "1")
    command = [sys.executable, "-X", "importtime", "-m", "integration_tests.benchmarks.coordination", *options]
    printed = subprocess.run(command, check=True, capture_output=True, text=True)
    imports = re.findall(r"\| +torch$", printed.stderr, re.MULTILINE)
    assert len(imports) == 2  # the command itself, and the copied process


def sockets_to_the_store() -> tuple[int, int]:
    """Connections of this rank to the store during an operation, and of all ranks to this rank's server."""
    assert dist.group.WORLD is not None
    port = innermost_store(store_of(dist.group.WORLD)).port
    with make_coordinator() as them:
        them.barrier("all are connected")
        ends = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
                if each.family != socket.AF_UNIX:
                    ends.append((each.getsockname()[1], each.getpeername()[1]))
        them.barrier("all have counted")
    return sum(remote == port for _, remote in ends), sum(local == port for local, _ in ends)


def test_each_rank_has_three_connections_to_the_store(ranks: Any) -> None:
    ranks.run(1, dist.is_initialized, backend=None)  # a new group
    (own, served), (other, _) = ranks.run(2, sockets_to_the_store)
    assert own == other == formula("sockets to the store", leaders=True, ranks=2)
    assert served == formula("sockets of the process that serves", leaders=True, ranks=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "processes", "leaders"), [(256, 4, False), (2_816, 44, True), (10_992, 43, True)])
def test_the_formulas_hold_for_many_ranks(tmp_path: Path, ranks: int, processes: int, leaders: bool) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < ranks + 1000:
        pytest.skip(f"needs {ranks + 1000:,} open files in one process: raise the hard limit, ulimit -Hn")
    figures = tmp_path / "figures.json"
    benchmark = f"--ranks {ranks} --processes {processes} --plan-bytes 300 --rounds 1 --json {figures}"
    command = f"exec {sys.executable} -m integration_tests.benchmarks.coordination {benchmark}"
    if os.geteuid() == 0:  # torch asks for the name of each peer, which takes seconds with some name servers
        (tmp_path / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n")
        (tmp_path / "nsswitch.conf").write_text("hosts: files\n")
        mounts = [f"mount --bind {tmp_path}/{name} /etc/{name}" for name in ("hosts", "nsswitch.conf")]
        command = shlex.join(["unshare", "--mount", "bash", "-c", " && ".join([*mounts, command])])
    subprocess.run(["bash", "-c", command], check=True, timeout=1700)
    results = json.loads(figures.read_text())["results"]
    (load,) = (each["load"] for each in results if each["leaders"] == leaders)
    check(ranks, load, leaders=leaders)
