"""The formulas of `docs/planning.md` for connections and requests, on simulated ranks with real sockets."""

from __future__ import annotations

import contextlib
import os
import re
import socket
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


def check(ranks: int, processes: int, *, leaders: bool) -> None:
    (result,) = measure([Setting(ranks, leaders, rounds=1, plan_bytes=3_000)], processes)
    same, each, sockets = (result.load[name] for name in ("fingerprints", "plans", "sockets"))

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
    check(32, 2, leaders=leaders)


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
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "processes", "leaders"),
    [(256, 4, False), (256, 4, True)],
)
def test_the_formulas_hold_for_many_ranks(ranks: int, processes: int, leaders: bool) -> None:
    check(ranks, processes, leaders=leaders)
