"""Ranks of a proof as forks of one process that has imported everything, which saves the seconds of imports.

A fork begins with the random states of the process that was forked; the loops here seed every generator.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from dcp_manager.testing import RunFailedError
from dcp_manager.testing.processes import launcher_environment, launcher_store

__all__ = ["run_forked_ranks"]

_PRELOADED = ["torch._dynamo", "integration_tests.resume.language", "integration_tests.resume.vision"]


def run_forked_ranks(
    command: Sequence[str], world_size: int, folder: Path, *, what: str, killed: bool = False, timeout_seconds: float
) -> None:
    """Run the ranks of a job of `prove_resume`; see `run_ranks`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    store = launcher_store()
    processes: list[Any] = []
    for rank in range(world_size):
        environment = launcher_environment(rank, world_size, store.port)
        log = str(folder / f"rank{rank}.log")
        processes.append(context.Process(target=_run, args=(command[-1], environment, log)))
        processes[-1].start()
    try:
        wanted = -signal.SIGKILL if killed else 0
        connection.wait([process.sentinel for process in processes], timeout_seconds)
        for process in processes:
            process.join(timeout_seconds)
        for rank, process in enumerate(processes):
            if process.exitcode != wanted:
                text = (folder / f"rank{rank}.log").read_text()
                raise RunFailedError(f"{what}: rank {rank} ended with {process.exitcode}\n{text}")
    finally:
        for process in processes:
            process.kill()


def _run(job: str, environment: dict[str, str], log: str) -> None:
    from dcp_manager.testing.rank import run_rank

    # Data workers are then children of the rank, and notice its death.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(environment)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        run_rank(job)
    except BaseException:
        traceback.print_exc()
        raise
