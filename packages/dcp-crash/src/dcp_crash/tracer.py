"""Tracer of processes: counts and records their system calls on one folder, and injects a fault into one of them.

A seccomp filter selects the system calls at which the kernel stops a process; everything else runs at full speed.
Processes are started by `running`; the states of a disk after a loss of power are computed by `disk`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from dcp_crash import kernel
from dcp_crash.calls import BY_NUMBER, CREATE_BITS, MARK_FOLDER, Kind, Memory, places_of
from dcp_crash.faults import WRITING, Fault
from dcp_crash.recording import Call, Recorder
from dcp_crash.shortening import shorten

__all__ = ["Tracer"]

_ALL_CHILDREN, _THIS_THREAD = 0x40000000, 0x20000000  # __WALL, __WNOTHREAD
_SYSCALL_STOP = signal.SIGTRAP | 0x80


@dataclass(slots=True)
class _Running:
    """A system call in progress, and the action at its exit."""

    call: Call
    kill: bool = False
    fail: int = 0
    undo: Callable[[], None] | None = None


@dataclass
class Tracer:
    """Tracer of the ranks' processes. Use it only from the thread that started these processes.

    Attributes:
        folder: Folder; system calls on its files and subfolders are counted.
        ranks: Process id → rank, for the started processes; child processes belong to the rank of their parent.
        fault: Fault to inject; None for no fault.
        reads: Whether to count system calls that read files instead of those that change files.
        recorder: Recorder that receives all changes; None to record nothing.
        held: Function that is called with the id of a process that the fault `stop` has stopped; the process continues
            when `held` returns.
        on_end: Function that is called with process id and wait status when the process of a rank has ended.
        calls: Rank → names of the counted system calls that the rank's own process made, in order.
        started_calls: Rank → names of the counted system calls that processes started by the rank made, in order.
        struck: Whether the fault has occurred.
    """

    folder: str
    ranks: dict[int, int]
    fault: Fault | None = None
    reads: bool = False
    recorder: Recorder | None = None
    held: Callable[[int], object] = lambda _: None
    on_end: Callable[[int, int], object] = lambda _pid, _status: None
    calls: dict[int, list[str]] = field(default_factory=dict)
    started_calls: dict[int, list[str]] = field(default_factory=dict)
    struck: bool = False

    def __post_init__(self) -> None:
        self.folder = os.path.realpath(self.folder)
        self._kinds = BY_NUMBER["reads" if self.reads else "writes"]
        self._own = set(self.ranks)
        self._processes: dict[int, int] = {}
        self._running: dict[int, _Running] = {}
        self._counted = 0

    def follow(self) -> dict[int, int]:
        """Trace until all processes, with all their children, have ended; returns rank → wait status of its process."""
        ended: dict[int, int] = {}
        while True:
            try:
                tid, status = os.waitpid(-1, _ALL_CHILDREN | _THIS_THREAD)
            except ChildProcessError:
                return ended
            if os.WIFSTOPPED(status):
                # A thread that was killed meanwhile is gone, and its files in `/proc` are: its end is reported next.
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    self._stopped(tid, status)
                continue
            self._running.pop(tid, None)
            if tid in self._own:
                ended[tid] = status
                self.on_end(tid, status)

    def _stopped(self, tid: int, status: int) -> None:
        number, event = os.WSTOPSIG(status), status >> 16
        if event == kernel.EVENT_SECCOMP:
            self._begins(tid)
        elif number == _SYSCALL_STOP:
            self._ends(tid)
        elif event == kernel.EVENT_STOP and number != signal.SIGTRAP:
            kernel.listen(tid)
        else:
            kernel.resume(tid, 0 if event else number)

    def _begins(self, tid: int) -> None:
        values = kernel.registers(tid)
        kind, arguments, memory = self._kinds[values.number], values.arguments, Memory(tid)
        inside = self._inside(places_of(kind, arguments, memory))
        changes = self.reads or kind.flags is None or arguments[kind.flags] & CREATE_BITS
        if inside is None or not changes:
            kernel.resume(tid)
            return
        if inside and inside[0].startswith(MARK_FOLDER):
            if self.recorder is not None:
                self.recorder.mark(inside[0].removeprefix(MARK_FOLDER), self._rank_of(tid))
            kernel.resume(tid)
            return
        begun = self.recorder.now if self.recorder else 0
        running = _Running(Call(kind.name, arguments, inside, os.path.lexists(inside[0]), begun))
        self._running[tid] = running
        self._strike(tid, kind, values, running)

    def _inside(self, places: list[str]) -> list[str] | None:
        """Return the paths of a call, if one of them is in the folder (or is a mark); deleted files are in none."""
        if places and places[0].startswith(MARK_FOLDER):
            return places
        real = [self._real(path) for path in places]
        below = self.folder + os.sep
        return real if any(path == self.folder or path.startswith(below) for path in real) else None

    def _real(self, path: str) -> str:
        if path == self.folder or path.startswith(self.folder + os.sep):
            return path
        folder, name = os.path.split(path)
        return os.path.join(os.path.realpath(folder), name)

    def _strike(self, tid: int, kind: Kind, values: kernel.Registers, running: _Running) -> None:
        """Count the call, and resume the thread as the fault says."""
        number = self._count(tid, kind)
        fault = self.fault
        if fault is None or number < fault.at or (number > fault.at and fault.kind != "enospc"):
            self._go(tid, running)
            return
        self.struck = True
        if fault.kind == "kill":
            os.kill(self._process_of(tid), signal.SIGKILL)
            return
        if fault.kind == "stop":
            self.held(self._process_of(tid))
        elif fault.kind in {"torn", "short"} and kind.name in WRITING:
            running.undo = shorten(tid, kind.name, values)
            running.kill = fault.kind == "torn"
        elif fault.kind == "torn":
            os.kill(self._process_of(tid), signal.SIGKILL)
            return
        elif fault.kind == "eio" or (fault.kind == "enospc" and kind.space):
            running.fail = errno.EIO if fault.kind == "eio" else errno.ENOSPC
            if kind.name != "close":  # whatever it says, a descriptor is closed
                values.skip(-running.fail)
                kernel.set_registers(tid, values)
                self._running.pop(tid)
                kernel.resume(tid)
                return
        self._go(tid, running)

    def _go(self, tid: int, running: _Running) -> None:
        if self.recorder is None and not (running.kill or running.fail or running.undo):
            self._running.pop(tid)
            kernel.resume(tid)
        else:
            kernel.to_syscall_exit(tid)

    def _ends(self, tid: int) -> None:
        running = self._running.pop(tid, None)
        if running is None:
            kernel.resume(tid)
            return
        values = kernel.registers(tid)
        if self.recorder is not None and values.result >= 0:
            self.recorder.done(running.call, values.result, Memory(tid))
        if running.undo is not None:
            running.undo()
        if running.kill:
            os.kill(self._process_of(tid), signal.SIGKILL)
            return
        if running.fail:
            values.rax = (1 << 64) - running.fail
            kernel.set_registers(tid, values)
        kernel.resume(tid)

    def _count(self, tid: int, kind: Kind) -> int:
        """Return the call's number among those that the fault counts; 0 if it is not counted."""
        rank, own = self._rank_of(tid), self._process_of(tid) in self._own
        (self.calls if own else self.started_calls).setdefault(rank, []).append(kind.name)
        if self.fault is None or rank != self.fault.rank:
            return 0
        if self.fault.of != "all" and own != (self.fault.of == "own"):
            return 0
        self._counted += 1
        return self._counted

    def _process_of(self, tid: int) -> int:
        if tid not in self._processes:
            self._processes[tid] = _status(tid, "Tgid")
        return self._processes[tid]

    def _rank_of(self, tid: int) -> int:
        process = self._process_of(tid)
        if process not in self.ranks:
            parent = _status(process, "PPid")
            while parent not in self.ranks and parent > 1:
                parent = _status(parent, "PPid")
            self.ranks[process] = self.ranks.get(parent, -1)
        return self.ranks[process]


def _status(tid: int, name: str) -> int:
    with open(f"/proc/{tid}/status", encoding="ascii", errors="replace") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
