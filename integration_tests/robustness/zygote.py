"""A process that has imported everything and forks the ranks of one job after another: a new one takes milliseconds.

Run as `python -m integration_tests.robustness.zygote`: a job per line of stdin, its outcome on stdout, as JSON.
`Zygote` is the client. The ranks are followed by `dcp_crash`, which counts, strikes and records what they
do.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dcp_crash import Fault, run_traced
from dcp_crash.recording import Change
from dcp_crash.running import RankEnd
from integration_tests.forking import WARNINGS, join_group
from integration_tests.robustness import states
from integration_tests.robustness.actions import ACTIONS

__all__ = ["Job", "Outcome", "Zygote"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """What the ranks do, and what happens to one of them."""

    action: str
    """One of `actions`."""
    folder: str
    version: int = 0
    world: int = 1
    fault: Fault | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    watch: str | None = None
    """The folder whose calls count, if it is another one."""
    timeout_seconds: float = 120.0
    """Until the ranks are killed; `TimeoutError` then, and the zygote serves the next job."""


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended, and whether the fault struck."""

    ranks: list[RankEnd]
    struck: bool


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
        self._ended: Any = None

    def begin(self, job: Job) -> bool:
        """Start the ranks; whether one of them is held by the fault `stop` now, or else all have ended."""
        self._send({"job": asdict(job), "record": None})
        message = self._next()
        self._ended = None if message == "held" else message
        return self._ended is None

    def go_on(self) -> None:
        """Let the rank go on that is held."""
        self._send("go on")
        self._ended = self._next()

    def end(self) -> Outcome:
        """How the ranks ended."""
        return _outcome(self._ended)

    def run(self, job: Job) -> Outcome:
        """Start the ranks and wait for them."""
        assert not self.begin(job)
        return self.end()

    def record(self, job: Job) -> tuple[Outcome, list[Change]]:
        """Start the ranks and wait for them; what they did to the folder, too."""
        with tempfile.TemporaryDirectory() as place:
            self._send({"job": asdict(job), "record": f"{place}/changes"})
            outcome = _outcome(self._next())
            changes: list[Change] = pickle.loads(Path(place, "changes").read_bytes())
        return outcome, changes

    def close(self) -> None:
        """End the zygote."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _next(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the zygote ended with {self._process.wait(30)}")
        return json.loads(line)


def _outcome(message: Any) -> Outcome:
    if "timeout" in message:
        raise TimeoutError(message["timeout"])
    return Outcome([RankEnd(**values) for values in message["ranks"]], message["struck"])


def main() -> None:
    """Serve jobs until stdin ends."""
    replies = sys.stdout
    sys.stdout = sys.stderr

    def reply(message: Any) -> None:
        print(json.dumps(message), file=replies, flush=True)

    def held(pid: int) -> None:
        del pid
        reply("held")
        sys.stdin.readline()

    reply("ready")
    while line := sys.stdin.readline():
        request = json.loads(line)
        values = request["job"]
        fault = None if values["fault"] is None else Fault(**values["fault"])
        _run(Job(**{**values, "fault": fault}), request["record"], reply, held)


def _run(job: Job, record: str | None, reply: Any, held: Any) -> None:
    port_reader, port_writer = os.pipe()
    prepared: dict[str, Any] = {}

    def prepare(rank: int) -> None:
        if job.world > 1:
            join_group(job.world, rank, port_reader, port_writer)
        prepared["state"] = states.sharded(job.version)

    try:
        run = run_traced(
            lambda rank: ACTIONS[job.action](job.folder, job.version, prepared["state"], **job.options),
            job.watch or job.folder,
            world=job.world,
            prepare=prepare,
            fault=job.fault,
            record=record is not None,
            reads=job.action == "load",
            timeout_seconds=job.timeout_seconds,
            held=held,
        )
    except TimeoutError as error:
        reply({"timeout": str(error)})
        return
    finally:
        os.close(port_reader)
        os.close(port_writer)
    if record is not None:
        Path(record).write_bytes(pickle.dumps(run.changes))
    reply({"ranks": [asdict(end) for end in run.ranks], "struck": run.struck})


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
