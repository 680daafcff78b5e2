"""`run_job`: the ranks of one job, each a process of its own, on this machine or on pretended hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from integration_tests.kits.networks import NetworkHost

__all__ = ["host_of", "run_job"]

torch_dist: Any = dist  # whose stores its types do not export


def host_of(rank: int, ranks: int, hosts: int) -> int:
    """Return the number of the host of a rank, where the ranks go to the hosts in equal parts."""
    return rank * hosts // ranks


def run_job(
    module: str,
    task: Any,
    ranks: int,
    hosts: Sequence[NetworkHost] = (),
    environment: Callable[[int], Mapping[str, str]] = lambda _: {},
) -> list[Any]:
    """Run `python -m MODULE TASK` as each rank of a job, and return what they print in their last lines, as JSON.

    Args:
        module: The program of a rank.
        task: The argument of the program, which is passed as JSON.
        ranks: Number of ranks.
        hosts: Pretended hosts to which the ranks go in equal parts; none for this machine's own network.
        environment: Function from a rank to variables for it.

    Raises:
        RuntimeError: A rank failed; with what it printed.
    """
    address = hosts[0].addresses[0] if hosts else "127.0.0.1"
    with hosts[0].entered() if hosts else nullcontext():
        store = torch_dist.TCPStore(address, 0, None, is_master=True, wait_for_workers=False)
    processes = []
    try:
        for rank in range(ranks):
            host = hosts[host_of(rank, ranks, len(hosts))] if hosts else None
            place = ["nsenter", "--target", str(host.pid), "--net"] if host else []
            variables = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": address, "MASTER_PORT": store.port}
            variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "OMP_NUM_THREADS": 1}
            variables |= {"GLOO_SOCKET_IFNAME": "net0" if host else "lo"}
            given = {name: str(value) for name, value in variables.items()}
            processes.append(
                subprocess.Popen(
                    [*place, sys.executable, "-m", module, json.dumps(task)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**os.environ, **given, **environment(rank)},
                )
            )
        return [_hear(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _hear(process: subprocess.Popen[str]) -> Any:
    printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a rank ended with {process.returncode}:\n{printed}")
    return json.loads(printed.splitlines()[-1])
