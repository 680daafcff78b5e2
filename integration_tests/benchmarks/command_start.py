"""How long the command takes to start, look at a checkpoint of a few values, and end."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["COMMANDS", "start_seconds"]

COMMANDS = ("ls", "show", "plugins")


def start_seconds(checkpoint: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Command → seconds by the clock and of processor time, for each round; the commands in turn.

    Compiled modules are kept, as they are for installed packages, also where this process may write none.

    Raises:
        RuntimeError: A command failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": scratch}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        taken: dict[str, list[tuple[float, float]]] = {command: [] for command in COMMANDS}
        for turn in range(rounds + 1):
            for command, found in taken.items():
                place = [] if command == "plugins" else [str(checkpoint.parent if command == "ls" else checkpoint)]
                seconds = _seconds([sys.executable, "-m", "dcp_inspect", command, *place], environment)
                if turn:
                    found.append(seconds)
        return taken


def _seconds(command: Sequence[str], environment: dict[str, str]) -> tuple[float, float]:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    spent, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {ran.returncode}: {ran.stderr}")
    return spent, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
