"""`run_traced`: forks the ranks of a job, counts and records their system calls, and injects a fault."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dcp_crash import kernel
from dcp_crash.calls import BY_NUMBER, CREATE_BITS, MARK_FOLDER
from dcp_crash.faults import Fault
from dcp_crash.recording import Change, Recorder
from dcp_crash.tracer import Tracer

__all__ = ["RankEnd", "Run", "mark", "run_traced"]


@dataclass(frozen=True)
class RankEnd:
    """Outcome of one rank of a traced run: signal that killed it, system calls, and result or error of `action`."""

    signal: int | None
    """Number of the signal that killed the rank's process; None if the process exited."""
    calls: list[str] = field(default_factory=list)
    """Names of the system calls on the folder that the rank's own process made or attempted, in order."""
    started_calls: list[str] = field(default_factory=list)
    """Names of the system calls on the folder by processes that the rank started, in order."""
    result: Any = None
    """Value that `action` returned on the rank; None if it raised, or the process was killed."""
    error: str | None = None
    """Traceback of the exception that `action` raised on the rank; None if it raised none."""

    @property
    def survived(self) -> bool:
        """Whether no signal killed the rank's process."""
        return self.signal is None


@dataclass(frozen=True)
class Run:
    """Result of `run_traced`: outcome of each rank, whether the fault occurred, and recorded changes of the folder."""

    ranks: list[RankEnd]
    struck: bool
    """Whether the fault occurred: the ranks reached the system call with its number."""
    changes: list[Change]
    """Changes of the folder in the order in which they were made; empty without `record=True`."""


def mark(text: str) -> None:
    """Add a mark to the changes that a traced run records, such as the text "save reported" when a save has returned.

    Called by a process of the run; does nothing in processes that are not traced.
    """
    with contextlib.suppress(OSError):
        os.open(MARK_FOLDER + text, os.O_WRONLY | os.O_CREAT)


def run_traced(
    action: Callable[[int], Any],
    folder: str | os.PathLike[str],
    *,
    world: int = 1,
    prepare: Callable[[int], object] = lambda _: None,
    fault: Fault | None = None,
    record: bool = False,
    reads: bool = False,
    timeout_seconds: float = 120.0,
    grace_seconds: float = 0.5,
    started: Callable[[list[int]], object] = lambda _: None,
    held: Callable[[int], object] = lambda _: None,
) -> Run:
    """Run `action(rank)` in one forked process per rank, and inject a fault at a system call on a folder.

    Processes that the ranks start are traced as well. All these processes have ended when `run_traced` returns.

    Args:
        action: Function that each rank runs with its rank as argument; `json.dumps` must accept its result.
        folder: Folder; system calls of `action` on this folder and on all files and folders below it are counted.
        world: Number of ranks.
        prepare: Function that each rank runs before `action`; its calls are not counted.
        fault: Fault to inject; None for no fault.
        record: Whether changes of the folder are recorded, for `disk_states`.
        reads: Whether to count system calls that read files instead of those that change files.
        timeout_seconds: Time in seconds after which all processes are killed and TimeoutError is raised.
        grace_seconds: Time in seconds that the other ranks may continue after a rank was killed; then they are killed.
        started: Function that is called once all ranks run, with their process ids in rank order.
        held: Function that is called with the id of a process that the fault `stop` has stopped; the process continues
            when `held` returns.

    Raises:
        TimeoutError: The ranks did not end in time.
        OSError: The kernel forbids tracing, as some containers do, or the machine is not x86-64 Linux.

    Example:
        ```python
        from pathlib import Path
        from dcp_crash import run_traced

        settings = Path("settings")
        settings.mkdir()
        run = run_traced(lambda rank: (settings / "new").write_text("b"), settings, record=True)
        print([change.kind for change in run.changes])
        ```
    """
    if not kernel.is_supported():
        raise OSError("system calls cannot be traced here: it takes Linux on x86-64, and nothing that forbids ptrace")
    job = _Job(action, os.fspath(folder), world, prepare, fault, record, reads, started, held)
    watch = _Watch(timeout_seconds, grace_seconds)
    # In a thread of its own: the kernel reports these processes to it, and no other children of this process.
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="dcp-crash-tracer") as pool:
            run = pool.submit(_follow, job, watch).result()
    finally:
        watch.cancel()
    if watch.expired:
        raise TimeoutError(f"the traced processes did not end within {timeout_seconds:g} s, and were killed")
    return run


@dataclass(frozen=True)
class _Job:
    """Arguments of `run_traced`: the functions to run, and the faults and callbacks."""

    action: Callable[[int], Any]
    folder: str
    world: int
    prepare: Callable[[int], object]
    fault: Fault | None
    record: bool
    reads: bool
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
        calls = (tracer.calls.get(rank, []), tracer.started_calls.get(rank, []))
        ends.append(_end(statuses[pid], report, *calls))
    return Run(ends, tracer.struck, recorder.changes if recorder else [])


def _fork(job: _Job, rank: int, report: int, gate_reader: int, gate_writer: int) -> int:
    with warnings.catch_warnings():
        # That there are threads, which is so: one follows, one waits for it, and the child uses nothing of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(gate_writer)
            os.read(gate_reader, 1)  # until the tracer is ready
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
        return {"result": job.action(rank)}
    except BaseException:  # noqa: BLE001 - what became of it is what the caller wants to know
        return {"error": traceback.format_exc()}


def _report(report: int, outcome: dict[str, Any]) -> None:
    data = json.dumps(outcome).encode()
    while data:
        data = data[os.write(report, data) :]


def _end(status: int, report: int, calls: list[str], started_calls: list[str]) -> RankEnd:
    with os.fdopen(report, "rb") as file:
        file.seek(0)
        text = file.read()
    if os.WIFSIGNALED(status):
        return RankEnd(os.WTERMSIG(status), calls, started_calls)
    values = json.loads(text) if text else {"error": f"the process ended with {os.WEXITSTATUS(status)} and no report"}
    return RankEnd(None, calls, started_calls, values.get("result"), values.get("error"))


class _Watch:
    """Timer that kills the remaining ranks at the deadline, or shortly after a rank was killed."""

    def __init__(self, timeout_seconds: float, grace_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._grace_seconds = grace_seconds
        self._timers: list[threading.Timer] = []
        self.processes: dict[int, int] = {}
        self.expired = False

    def begin(self) -> None:
        """Start the timer once all ranks are traced: one killed before could not be traced."""
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
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()

    def _expire(self) -> None:
        self.expired = True
        # A process may be about to start another one: until none is left.
        while True:
            self.kill()
            time.sleep(0.05)
            if all(_is_gone(pid) for pid in [*self.processes]):
                return

    def _start(self, seconds: float, action: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
