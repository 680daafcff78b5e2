"""Ranks of a proof as forks of one process that has imported everything, which saves the seconds of imports.

A fork begins with the random states of the process that was forked; the loops here seed every generator.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import traceback
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from dcp_base.errors import DcpError
from dcp_prove.processes import launcher_environment, launcher_store

__all__ = ["run_forked_ranks"]

_PRELOADED = [
    "torch._dynamo",
    "lightning.pytorch",
    "integration_tests.resume.language",
    "integration_tests.resume.vision",
]


def run_forked_ranks(
    command: Sequence[str],
    world_size: int,
    folder: Path,
    *,
    what: str,
    killed: bool = False,
    timeout_seconds: float,
    working_folder: Path | None = None,
) -> None:
    """Run the ranks of a job of `prove_resume` or `prove_script`; see `run_ranks`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    store = launcher_store()
    processes: list[Any] = []
    for rank in range(world_size):
        environment = launcher_environment(rank, world_size, store.port)
        log = str(folder / f"rank{rank}.log")
        job = (command, environment, log, working_folder, timeout_seconds / 2)
        processes.append(context.Process(target=_run, args=job))
        processes[-1].start()
    try:
        wanted = -signal.SIGKILL if killed else 0
        connection.wait([process.sentinel for process in processes], timeout_seconds)
        for process in processes:
            process.join(timeout_seconds)
        for rank, process in enumerate(processes):
            if process.exitcode != wanted:
                text = (folder / f"rank{rank}.log").read_text()
                raise DcpError(f"{what}: rank {rank} ended with {process.exitcode}\n{text}")
    finally:
        for process in processes:
            process.kill()


def _run(
    command: Sequence[str],
    environment: dict[str, str],
    log: str,
    working_folder: Path | None,
    traceback_seconds: float,
) -> None:
    from dcp_prove.rank import run_rank
    from dcp_prove.script_rank import run_script

    # Data workers are then children of the rank, and notice its death.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(environment)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(traceback_seconds, file=2)  # shows where a rank hangs
    *_, program, job = command
    if working_folder is not None:
        os.chdir(working_folder)
    try:
        (run_script if run_script.__name__ in program else run_rank)(job)
    except BaseException:
        traceback.print_exc()
        raise
