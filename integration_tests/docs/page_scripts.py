"""A process that has imported torch and us, and forks the scripts of the docs: a new one takes milliseconds.

Run as `python -m integration_tests.docs.page_scripts`: a script per line of stdin, the exit statuses of its ranks on
stdout, as JSON. `PageScripts` is the client. Ranks find each other as those of torchrun do.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

# Imported for those who are forked.
import torch.distributed.tensor  # noqa: F401

import dcp_all  # noqa: F401
from integration_tests.forking import WARNINGS
from integration_tests.launcher import launcher_store, rank_environment

__all__ = ["PageScripts"]

ROOT = Path(__file__).resolve().parents[2]


class PageScripts:
    """Runs scripts, one after another; a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *WARNINGS, "-m", "integration_tests.docs.page_scripts"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> PageScripts:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes its stdin, upon which it ends, and waits
            pass

    def run(self, script: Path, ranks: int) -> tuple[list[int], str]:
        """The exit status of each rank, and what all of them printed. They work in the script's folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Here, as it has threads, which the process that forks must not have.
        store = launcher_store()
        self._process.stdin.write(json.dumps([str(script), ranks, store.port]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks scripts has ended"
        return json.loads(line), _output(script).read_text()


def _output(script: Path) -> Path:
    return script.with_suffix(".output")


def main() -> None:
    """Serve until stdin ends. In a forked process: run the script, and end as any script does."""
    while line := sys.stdin.readline():
        script, ranks, port = json.loads(line)
        pids = []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                _become(Path(script), rank, ranks, port)
                runpy.run_path(script, run_name="__main__")
                return
            pids.append(pid)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(statuses), flush=True)


def _become(script: Path, rank: int, ranks: int, port: int) -> None:
    """Be a process like one that torchrun starts for the script, or the shell if it is alone."""
    os.chdir(script.parent)
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    if ranks > 1:
        os.environ.update(rank_environment(rank, ranks, port))
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(_output(script), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)


if __name__ == "__main__":
    main()
