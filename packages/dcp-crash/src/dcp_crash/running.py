"""`run_traced`: fork a job's ranks, count and record their system calls, and inject a fault."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dcp_crash import kernel
from dcp_crash.calls import BY_NUMBER, CREATE_BITS, MARK_FOLDER
from dcp_crash.faults import Fault
from dcp_crash.recording import Call, Change, Recorder
from dcp_crash.tracer import Tracer


@dataclass(frozen=True)
class RankEnd:
    """Outcome of one rank."""

    signal: int | None
    """Signal that killed the process, if any."""
    calls: list[str] = field(default_factory=list)
    """Its own system calls on the directory."""
    started_calls: list[str] = field(default_factory=list)
    """Those of processes that it started."""
    result: Any = None
    """Result of `action`; None if it raised, was killed, or is a program."""
    error: str | None = None
    """Traceback of `action`, or None."""
    status: int = 0
    """Exit status; 0 if a signal killed the process."""

    @property
    def survived(self) -> bool:
        """Whether no signal killed the process."""
        return self.signal is None


@dataclass(frozen=True)
class Run:
    """Result of `run_traced`."""

    ranks: list[RankEnd]
    calls: list[Call]
    """All counted system calls, in order."""
    struck: bool
    """Whether the fault occurred."""
    changes: list[Change]
    """In order; empty without `record=True`."""


def mark(text: str) -> None:
    """Add a mark, such as "save reported", to a traced run's changes; do nothing in other processes."""
    with contextlib.suppress(OSError):
        os.open(MARK_FOLDER + text, os.O_WRONLY | os.O_CREAT)


def run_traced(
    action: Callable[[int], Any] | Sequence[str],
    folder: str | os.PathLike[str],
    *,
    world: int = 1,
    prepare: Callable[[int], object] = lambda _: None,
    fault: Fault | None = None,
    record: bool = False,
    reads: bool = False,
    timeout_seconds: float = 120.0,
    grace_seconds: float = 0.5,
    output: str | os.PathLike[str] | None = None,
    started: Callable[[list[int]], object] = lambda _: None,
    held: Callable[[int], object] = lambda _: None,
) -> Run:
    """Run a function or a program in one process per rank, and inject a fault at a system call on a directory.

    ```python
    from pathlib import Path
    from dcp_crash import run_traced

    settings = Path("settings")
    settings.mkdir()
    run = run_traced(lambda rank: (settings / "new").write_text("b"), settings, record=True)
    print([change.kind for change in run.changes])
    ```

    Processes that ranks start are also traced. All have ended when this returns.

    Args:
        action: Function of the rank, with a result that `json.dumps` accepts; or the command line of a program.
        folder: Directory; system calls of `action` on it and everything below are counted.
        world: Number of ranks.
        prepare: Function of the rank that runs before `action`, uncounted.
        fault: Fault to inject.
        record: Whether to record changes for `disk_states`.
        reads: Whether to count calls that read files instead of calls that change them.
        timeout_seconds: Time until all processes are killed.
        grace_seconds: Time until the other ranks are killed after one was.
        output: File to which the processes print, with an empty stdin; by default they share the caller's terminal.
        started: Called with the process ids, in rank order, once all ranks run.
        held: Called with the id of a process that `stop` stopped; the process continues afterwards.

    Raises:
        TimeoutError: The ranks did not end in time.
        OSError: Tracing is forbidden, as in some containers, or this is not x86-64 Linux.
    """
    if obstacle := kernel.obstacle():
        raise OSError(obstacle)
    job = _Job(action, os.fspath(folder), world, prepare, fault, record, reads, output, started, held)
    watch = _Watch(timeout_seconds, grace_seconds)
    # The kernel reports only these processes to this separate thread, and no other children.
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="dcp-crash-tracer") as pool:
            following = pool.submit(_follow, job, watch)
            try:
                run = following.result()
            except BaseException:  # such as an interrupt; without this, the processes would run to their end
                watch.kill_all(following.done)
                raise
    finally:
        watch.cancel()
    if watch.expired:
        raise TimeoutError(f"the traced processes did not end within {timeout_seconds:g} s, and were killed")
    return run


@dataclass(frozen=True)
class _Job:
    action: Callable[[int], Any] | Sequence[str]
    folder: str
    world: int
    prepare: Callable[[int], object]
    fault: Fault | None
    record: bool
    reads: bool
    output: str | os.PathLike[str] | None
    started: Callable[[list[int]], object]
    held: Callable[[int], object]


def _follow(job: _Job, watch: _Watch) -> Run:
    reports = [os.memfd_create(f"dcp-crash-rank-{rank}") for rank in range(job.world)]
    gate_reader, gate_writer = os.pipe()
    pids = [_fork(job, rank, report, gate_reader, gate_writer) for rank, report in enumerate(reports)]
    os.close(gate_reader)
    watch.processes = dict.fromkeys(pids, 0)
    try:
        for pid in pids:
            kernel.seize(pid)
    except OSError as error:
        watch.kill()
        for pid in pids:
            os.waitpid(pid, 0)
        text = f"{error.strerror}: ptrace is forbidden here; allow it, or run this elsewhere"
        raise OSError(error.errno, text) from error
    finally:
        os.close(gate_writer)
    recorder = Recorder() if job.record else None
    ranks = {pid: rank for rank, pid in enumerate(pids)}
    tracer = Tracer(job.folder, ranks, job.fault, job.reads, recorder, job.held, watch.rank_ended)
    watch.processes = tracer.ranks
    watch.begin()
    job.started(pids)
    statuses = tracer.follow()
    ends = []
    for rank, (pid, report) in enumerate(zip(pids, reports, strict=True)):
        own, of_started = (
            [call.name for call in tracer.calls if (call.rank, call.own) == (rank, own)] for own in (True, False)
        )
        ends.append(_end(job, statuses[pid], report, own, of_started))
    return Run(ends, tracer.calls, tracer.struck, recorder.changes if recorder else [])


def _fork(job: _Job, rank: int, report: int, gate_reader: int, gate_writer: int) -> int:
    with warnings.catch_warnings():
        # The warning about threads does not apply: the child uses nothing of the two threads here.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(gate_writer)
            os.read(gate_reader, 1)  # until the tracer is ready
            if job.output is not None:
                _redirect(job.output)
            _report(report, _outcome(job, rank))
            status = 0
        finally:
            os._exit(status)
    return pid


def _outcome(job: _Job, rank: int) -> dict[str, Any]:
    try:
        job.prepare(rank)
        kinds = BY_NUMBER["reads" if job.reads else "writes"]
        creating = [] if job.reads else [(kind.number, kind.flags) for kind in kinds.values() if kind.flags is not None]
        always = kinds.keys() - {number for number, _ in creating}
        kernel.install_filter(always, creating, CREATE_BITS)
        if callable(job.action):
            return {"result": job.action(rank)}
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and programs inherit that
        os.execvp(job.action[0], [*job.action])
    except BaseException:  # noqa: BLE001 - reported to the caller
        return {"error": traceback.format_exc()}


def _redirect(output: str | os.PathLike[str]) -> None:
    nothing, printed = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target, source in ((0, nothing), (1, printed), (2, printed)):
        os.dup2(source, target)


def _report(report: int, outcome: dict[str, Any]) -> None:
    data = json.dumps(outcome).encode()
    while data:
        data = data[os.write(report, data) :]


def _end(job: _Job, status: int, report: int, calls: list[str], started_calls: list[str]) -> RankEnd:
    with os.fdopen(report, "rb") as file:
        file.seek(0)
        text = file.read()
    if os.WIFSIGNALED(status):
        return RankEnd(os.WTERMSIG(status), calls, started_calls)
    code = os.WEXITSTATUS(status)
    missing = {"error": f"the process ended with {code} and no report"} if callable(job.action) else {}
    values = json.loads(text) if text else missing
    return RankEnd(None, calls, started_calls, values.get("result"), values.get("error"), code)


class _Watch:
    def __init__(self, timeout_seconds: float, grace_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._grace_seconds = grace_seconds
        self._timers: list[threading.Timer] = []
        self.processes: dict[int, int] = {}
        self.expired = False

    def begin(self) -> None:
        """Start once all ranks are traced: a killed rank cannot be traced."""
        self._start(self._timeout_seconds, self._expire)

    def rank_ended(self, pid: int, status: int) -> None:
        del pid
        if os.WIFSIGNALED(status) and len(self._timers) == 1:
            self._start(self._grace_seconds, self.kill)

    def kill(self) -> None:
        for pid in [*self.processes]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cancel(self) -> None:
        self.processes = {}
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()

    def kill_all(self, done: Callable[[], bool]) -> None:
        # Repeat until no process is left, because a process may be starting another.
        while not done():
            self.kill()
            time.sleep(0.05)

    def _expire(self) -> None:
        self.expired = True
        self.kill_all(lambda: not self.processes)

    def _start(self, seconds: float, action: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()
