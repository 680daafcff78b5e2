"""One life of the run: its ranks are started, told what to save, and end or are killed."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from integration_tests.launcher import launcher_store
from integration_tests.process_end import has_ended
from integration_tests.soak.processes import children

__all__ = ["Life", "RankGoneError"]

ROOT = Path(__file__).resolve().parents[2]
CLOCK_FOLDER = Path(__file__).parent / "clock"
PATIENCE_SECONDS = 150.0
# Imports of torch leave nothing behind that the run is about.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}


class RankGoneError(RuntimeError):
    """A rank has ended that was to answer."""


class Life:
    """Started ranks.

    Args:
        root: Where they save.
        world: How many.
        saver: `thread` or `process`.
        clock: The file that shifts their clock.
    """

    def __init__(self, root: Path, world: int, saver: str, clock: Path) -> None:
        self.saver = saver
        self._store = launcher_store()
        self.saved: set[int] = set()
        self.told: dict[int, str] = {}
        self._answers: list[queue.Queue[dict[str, Any] | None]] = [queue.Queue() for _ in range(world)]
        path = os.pathsep.join([str(CLOCK_FOLDER), str(ROOT), *filter(None, sys.path)])
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-m", "integration_tests.soak.rank"],
                cwd=root,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if not os.environ.get("DCP_SOAK_VERBOSE") else None,
                text=True,
                env={
                    **os.environ, **_ENVIRONMENT, "PYTHONPATH": path, "RANK": str(rank), "WORLD_SIZE": str(world),
                    "MASTER_PORT": str(self._store.port), "DCP_SOAK_ROOT": str(root / "run"),
                    "DCP_SOAK_SAVER": saver, "DCP_SOAK_CLOCK": str(clock),
                },
            )
            for rank in range(world)
        ]  # fmt: skip
        self._readers = [threading.Thread(target=self._listen, args=(rank,)) for rank in range(world)]
        for thread in self._readers:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Of the ranks."""
        return [process.pid for process in self._processes]

    @property
    def workers(self) -> list[int]:
        """Of the savers' processes that run."""
        return [pid for rank in self.pids for pid in children(rank) if not has_ended(pid)]

    def _listen(self, rank: int) -> None:
        """Sort what a rank says: that a save has ended may come at any time."""
        lines = self._processes[rank].stdout
        assert lines is not None
        for line in lines:
            message = json.loads(line)
            if "saved" not in message:
                self._answers[rank].put(message)
            elif message["saved"]:
                self.saved.add(message["step"])
            else:
                self.told[message["step"]] = message["why"]
        self._answers[rank].put(None)

    def answers(self) -> list[dict[str, Any]]:
        """The next answer of every rank. Raises RankGoneError if one has ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        found = []
        for rank, answers in enumerate(self._answers):
            try:
                answer = answers.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"rank {rank} has not answered within {PATIENCE_SECONDS:g} s") from None
            if answer is None:
                raise RankGoneError(f"rank {rank} has ended with {self._processes[rank].wait()}")
            found.append(answer)
        return found

    def tell(self, do: str, step: int = 0) -> None:
        """Give every rank a command."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"do": do, "step": step}) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                continue

    def kill(self) -> None:
        """End every rank at once, as a launcher does after one has died."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        """Until all ranks have ended and all they said was heard."""
        for process in self._processes:
            process.wait(PATIENCE_SECONDS)
        for thread in self._readers:
            thread.join(PATIENCE_SECONDS)
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
