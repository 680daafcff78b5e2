"""The harness's side of the processes that are measured: start them, send commands, wait for answers, end them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from integration_tests.benchmarks.environments import ROOT
from integration_tests.launcher import launcher_store, rank_environment

__all__ = ["Reply", "Team", "WorkerError"]

Reply = dict[str, Any]
_MODULE = "integration_tests.benchmarks.workers.main"
_TAIL_LINES = 15


class WorkerError(RuntimeError):
    """A rank raised, ended, or did not answer in time; the text is what it said, or the end of its output."""


class Team:
    """The ranks of one job, one process each; they answer commands together.

    Args:
        python: The interpreter of their environment.
        ranks: How many; one alone gets no process group.
        logs: A folder for what they print.
        timeout_seconds: How long one command may take.
    """

    def __init__(self, python: str, ranks: int, logs: Path, *, timeout_seconds: float = 900.0) -> None:
        self._timeout_seconds = timeout_seconds
        self._logs = [logs / f"rank{rank}.log" for rank in range(ranks)]
        self._store = launcher_store()
        logs.mkdir(parents=True, exist_ok=True)
        self._processes = [self._start(python, rank, ranks) for rank in range(ranks)]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def call(self, act: str, **arguments: Any) -> list[Reply]:
        """Every rank's answer, in rank order.

        Raises:
            WorkerError: Some rank failed; the team must be closed.
        """
        line = json.dumps({"act": act, **arguments}).encode() + b"\n"
        deadline = time.monotonic() + self._timeout_seconds
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                raise WorkerError(f"rank {rank} has ended: {self._tail(rank)}") from None
        replies = [self._answer(rank, deadline) for rank in range(len(self._processes))]
        for reply in replies:
            if "error" in reply:
                raise WorkerError(reply["error"])
        return replies

    def close(self) -> None:
        """End every process."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()

    def _start(self, python: str, rank: int, ranks: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
        environment.pop("WORLD_SIZE", None)
        if ranks > 1:
            environment |= rank_environment(rank, ranks, self._store.port)
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        with self._logs[rank].open("ab") as log:
            return subprocess.Popen(
                [python, "-m", _MODULE],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )

    def _answer(self, rank: int, deadline: float) -> Reply:
        pipe = self._processes[rank].stdout
        assert pipe is not None
        text = b""
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(f"rank {rank} did not answer in {self._timeout_seconds:.0f} s: {self._tail(rank)}")
            read = os.read(pipe.fileno(), 1 << 20)
            if not read:
                raise WorkerError(f"rank {rank} has ended: {self._tail(rank)}")
            text += read
        reply: Reply = json.loads(text)
        return reply

    def _tail(self, rank: int) -> str:
        return "\n".join(self._logs[rank].read_text(errors="replace").splitlines()[-_TAIL_LINES:])
