"""A process that has imported everything and forks the ranks of one job after another: a new one takes milliseconds.

Run as `python -m integration_tests.robustness.zygote`: a job per line of stdin, its outcome on stdout, as JSON.
`Zygote` is the client.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from integration_tests.robustness import states
from integration_tests.robustness.system_calls import READS, WRITES, Strike, intercepted

__all__ = ["Job", "RankEnd", "Zygote"]

ROOT = Path(__file__).resolve().parents[2]
GROUP_SECONDS = 30
# A rank that waits for a killed one is killed as well, as a launcher does; by then it has cleaned up, if it ever will.
GRACE_SECONDS = 0.5
# From Python 3.12 on, forking a process with threads warns; those of torch's libraries are idle here.
WARNINGS = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")


@dataclass(frozen=True)
class Job:
    """What the ranks do, and what happens to one of them."""

    action: str
    """`save` or `load`."""
    folder: str
    version: int = 0
    world: int = 1
    victim: int = 0
    strike: tuple[int, str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: killed by a signal, or with its calls and either a result or an error."""

    signal: int | None
    calls: list[str] = field(default_factory=list)
    result: Any = None
    error: str | None = None

    @property
    def survived(self) -> bool:
        """Whether it was not killed."""
        return self.signal is None


class Zygote:
    """A started zygote; runs one job at a time, or one job beside which the test does something else."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *WARNINGS, "-m", "integration_tests.robustness.zygote"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._next()

    def begin(self, job: Job) -> list[int]:
        """Start the ranks; their process ids."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        pids: list[int] = self._next()
        return pids

    def end(self) -> list[RankEnd]:
        """Wait for the ranks; how each ended."""
        return [RankEnd(**values) for values in self._next()]

    def run(self, job: Job) -> list[RankEnd]:
        """Start the ranks and wait for them."""
        self.begin(job)
        return self.end()

    def close(self) -> None:
        """End the zygote."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _next(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the zygote ended with {self._process.wait(30)}")
        return json.loads(line)


def main() -> None:
    """Serve jobs until stdin ends."""
    replies = sys.stdout
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        ranks = _fork(Job(**job))
        print(json.dumps([pid for pid, _ in ranks]), file=replies, flush=True)
        print(json.dumps(_wait(ranks)), file=replies, flush=True)


def _fork(job: Job) -> list[tuple[int, int]]:
    """A process per rank: its id, and where it reports to."""
    port_reader, port_writer = os.pipe()
    ranks = []
    for rank in range(job.world):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            with contextlib.suppress(BaseException):
                outcome = _be_rank(job, rank, port_reader, port_writer)
                os.write(writer, json.dumps(outcome).encode())
            os._exit(0)
        os.close(writer)
        ranks.append((pid, reader))
    os.close(port_reader)
    os.close(port_writer)
    return ranks


def _wait(ranks: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Wait until all have ended, and see to it once one was killed."""
    statuses: dict[int, int] = {}
    deadline = float("inf")
    while len(statuses) < len(ranks):
        for pid, _ in ranks:
            if pid not in statuses and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[pid] = ended[1]
                if os.WIFSIGNALED(ended[1]):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            deadline = float("inf")
            for pid, _ in ranks:
                if pid not in statuses:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    return [_outcome(statuses[pid], reader) for pid, reader in ranks]


def _outcome(status: int, reader: int) -> dict[str, Any]:
    with os.fdopen(reader, "rb") as pipe:
        report = pipe.read()
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    values: dict[str, Any] = json.loads(report)
    return values


def _be_rank(job: Job, rank: int, port_reader: int, port_writer: int) -> dict[str, Any]:
    strike = Strike(*job.strike) if job.strike is not None and job.victim == rank else None
    result, error = None, None
    if job.world > 1:
        _join(job.world, rank, port_reader, port_writer)
    state = states.sharded(job.version)
    with intercepted(strike, WRITES if job.action == "save" else READS) as calls:
        try:
            result = _ACTIONS[job.action](job, state)
        except Exception:  # noqa: BLE001 - what became of the job is what the test looks at
            error = traceback.format_exc()
    return {"signal": None, "calls": calls.names, "result": result, "error": error}


def _join(world: int, rank: int, port_reader: int, port_writer: int) -> None:
    timeout = timedelta(seconds=GROUP_SECONDS)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timeout, wait_for_workers=False)
        os.write(port_writer, store.port.to_bytes(4, "little") * (world - 1))
    else:
        port = int.from_bytes(os.read(port_reader, 4), "little")
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timeout, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def _save(job: Job, state: dict[str, Any]) -> str | None:
    saved = states.save(job.folder, job.version, state=state, **job.options)
    save_id: str | None = saved.storage_meta.save_id
    return save_id


def _load(job: Job, state: dict[str, Any]) -> int:
    del state
    return states.version_in(job.folder, job.options["versions"])


_ACTIONS = {"save": _save, "load": _load}


def _warm_up() -> None:
    """Have imported what is imported late: a group of one, a save and a load."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        states.save(folder, 0)
        states.version_in(folder, [0])
    dist.destroy_process_group()


if __name__ == "__main__":
    _warm_up()
    main()
