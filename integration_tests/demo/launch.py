"""Starts the ranks of a job as processes of their own, hears their events, and can kill one of them.

What lives here: processes, pipes and the environment that a launcher gives to ranks. What a rank does is `worker`.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from integration_tests.launcher import launcher_store, rank_environment

__all__ = ["Event", "Job", "JobFailedError"]

Event = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
EVENTS_FD = "DEMO_EVENTS_FD"
PATIENCE_SECONDS = 3.0


class JobFailedError(RuntimeError):
    """A rank ended with an error; the message names the rank and holds the end of what it printed."""


class Job:
    """`world_size` ranks that run one task; a context manager that leaves no process behind.

    When a rank fails, the others are given `PATIENCE_SECONDS` to notice; then they are ended, as launchers do.
    """

    def __init__(self, task: str, world_size: int, folder: Path, **options: Any) -> None:
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._open_pipes = world_size
        self._store = launcher_store()
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
        self.processes = [
            self._start(rank, {"task": task, **options}, _environment(rank, world_size, self._store.port))
            for rank in range(world_size)
        ]
        threading.Thread(target=self._supervise, daemon=True).start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def events(self) -> Iterator[Event]:
        """What the ranks report, as it comes, until all of them have closed their pipes."""
        while self._open_pipes:
            event = self._events.get()
            if event is None:
                self._open_pipes -= 1
            else:
                yield event

    def kill(self, rank: int) -> None:
        """SIGKILL one rank."""
        os.kill(self.processes[rank].pid, signal.SIGKILL)

    def alive(self, rank: int) -> bool:
        """Whether a rank still runs."""
        return self.processes[rank].poll() is None

    def wait(self) -> None:
        """Wait for every rank.

        Raises:
            JobFailedError: a rank ended with another exit status than 0.
        """
        statuses = {rank: process.wait() for rank, process in enumerate(self.processes)}
        failed = sorted((rank for rank, status in statuses.items() if status), key=lambda rank: statuses[rank] < 0)
        if failed:  # those that raised come before those that were killed
            rank = failed[0]
            raise JobFailedError(f"rank {rank} ended with status {statuses[rank]}:\n{self.tail(rank)}")

    def tail(self, rank: int, *, lines: int = 30) -> str:
        """The last lines that a rank printed."""
        return "\n".join(self.logs[rank].read_text(errors="replace").splitlines()[-lines:])

    def _supervise(self) -> None:
        while not any(process.poll() for process in self.processes):
            if all(process.poll() == 0 for process in self.processes):
                return
            time.sleep(0.05)
        time.sleep(PATIENCE_SECONDS)
        for rank in filter(self.alive, range(len(self.processes))):
            self.kill(rank)

    def _start(self, rank: int, options: dict[str, Any], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        reading, writing = os.pipe()
        with self.logs[rank].open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", json.dumps(options)],
                cwd=ROOT,
                env={**environment, EVENTS_FD: str(writing)},
                pass_fds=[writing],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        os.close(writing)
        threading.Thread(target=self._hear, args=(reading,), daemon=True).start()
        return process

    def _hear(self, pipe: int) -> None:
        with os.fdopen(pipe, "r", encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):  # a killed rank may leave half a line
                    self._events.put(json.loads(line))
        self._events.put(None)


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set, one thread per rank, and the loopback device for gloo."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if sys.platform == "linux":
        own["GLOO_SOCKET_IFNAME"] = "lo"
    return {**os.environ, **rank_environment(rank, world_size, port), **own}
