"""Count and record processes' system calls on one directory, and inject a fault."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from dcp_crash import kernel
from dcp_crash.calls import BY_NUMBER, CREATE_BITS, MARK_FOLDER, Kind, Memory, places_of
from dcp_crash.faults import WRITING, Fault
from dcp_crash.recording import Call, Recorder

_ALL_CHILDREN, _THIS_THREAD = 0x40000000, 0x20000000  # __WALL, __WNOTHREAD
_SYSCALL_STOP = signal.SIGTRAP | 0x80


@dataclass(slots=True)
class _Running:
    call: Call
    kill: Fault | None = None
    fail: int = 0
    undo: Callable[[], None] | None = None


@dataclass
class Tracer:
    """Tracer of the ranks' processes, only for the thread that started them; arguments as in `run_traced`."""

    folder: str
    ranks: dict[int, int]
    fault: Fault | None = None
    reads: bool = False
    recorder: Recorder | None = None
    held: Callable[[int], object] = lambda _: None
    on_end: Callable[[int, int], object] = lambda _pid, _status: None
    calls: list[Call] = field(default_factory=list)
    struck: bool = False

    def __post_init__(self) -> None:
        self.folder = os.path.realpath(self.folder)
        self._kinds = BY_NUMBER["reads" if self.reads else "writes"]
        self._own = set(self.ranks)
        self._processes: dict[int, int] = {}
        self._running: dict[int, _Running] = {}
        self._counted = 0

    def follow(self) -> dict[int, int]:
        """Trace until all processes and children end; return rank → wait status."""
        ended: dict[int, int] = {}
        while True:
            try:
                tid, status = os.waitpid(-1, _ALL_CHILDREN | _THIS_THREAD)
            except ChildProcessError:
                return ended
            if os.WIFSTOPPED(status):
                # A killed thread has no files in `/proc`; its end is reported next.
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    self._stopped(tid, status)
                continue
            self._running.pop(tid, None)
            self._processes.pop(tid, None)
            self.ranks.pop(tid, None)  # the number may soon be that of a process of somebody else
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
        elif event == kernel.EVENT_STOP:  # a new thread or process
            self._processes.pop(tid, None)
            self._rank_of(tid)
            kernel.resume(tid)
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
        rank, own = self._rank_of(tid), self._process_of(tid) in self._own
        running = _Running(Call(kind.name, arguments, inside, os.path.lexists(inside[0]), begun, rank, own))
        self.calls.append(running.call)
        self._running[tid] = running
        self._strike(tid, kind, values, running)

    def _inside(self, places: list[str]) -> list[str] | None:
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
        number = self._count(running.call)
        fault = self.fault
        if fault is None or number < fault.at or (number > fault.at and fault.kind != "enospc"):
            self._go(tid, running)
            return
        self.struck = True
        if fault.kind == "kill":
            self._kill(tid, fault)
            return
        if fault.kind == "stop":
            self.held(self._process_of(tid))
        elif fault.kind in {"torn", "short"} and kind.name in WRITING:
            running.undo = _shorten(tid, kind.name, values)
            running.kill = fault if fault.kind == "torn" else None
        elif fault.kind == "torn":
            self._kill(tid, fault)
            return
        elif fault.kind == "eio" or (fault.kind == "enospc" and kind.space):
            running.fail = errno.EIO if fault.kind == "eio" else errno.ENOSPC
            if kind.name != "close":  # even a failing close closes the descriptor
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
            self._kill(tid, running.kill)
            return
        if running.fail:
            values.rax = (1 << 64) - running.fail
            kernel.set_registers(tid, values)
        kernel.resume(tid)

    def _count(self, call: Call) -> int:
        if self.fault is None or call.rank != self.fault.rank:
            return 0
        if self.fault.of != "all" and call.own != (self.fault.of == "own"):
            return 0
        self._counted += 1
        return self._counted

    def _kill(self, tid: int, fault: Fault) -> None:
        together = [process for process, rank in self.ranks.items() if rank == fault.rank]
        for process in together if fault.of == "all" else [self._process_of(tid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

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
            orphan = 0 if len(self._own) == 1 else -1
            self.ranks[process] = self.ranks.get(parent, orphan)
        return self.ranks[process]


def _status(tid: int, name: str) -> int:
    with open(f"/proc/{tid}/status", encoding="ascii", errors="replace") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# Register with the byte count of a call without vectors.
_COUNTS = {"write": "rdx", "pwrite64": "rdx", "sendfile": "r10", "copy_file_range": "r8"}


def _shorten(tid: int, name: str, values: kernel.Registers) -> Callable[[], None]:
    """Halve a stopped thread's write; the result restores the thread's memory after it."""
    if name in _COUNTS:
        register = _COUNTS[name]
        setattr(values, register, _half(getattr(values, register)))
        kernel.set_registers(tid, values)
        return lambda: None
    _, address, count = values.arguments[:3]
    memory = Memory(tid)
    vectors = memory.vectors(address, count)
    left = _half(sum(size for _, size in vectors))
    shorter = []
    for start, size in vectors:
        shorter.append(struct.pack("QQ", start, min(size, left)))
        left -= min(size, left)
    before = memory.read(address, 16 * count)
    memory.write(address, b"".join(shorter))
    return lambda: memory.write(address, before)


def _half(count: int) -> int:
    return count // 2 if count > 1 else count
