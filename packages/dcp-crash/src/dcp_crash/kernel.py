"""ptrace, seccomp filters and registers over ctypes, for x86-64 Linux.

Source: ptrace(2), seccomp(2), linux/filter.h, linux/seccomp.h.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Iterable

EVENT_SECCOMP, EVENT_STOP = 7, 128

_CONT, _GETREGS, _SETREGS, _SYSCALL, _SEIZE, _LISTEN = 7, 12, 13, 24, 0x4206, 0x4208
# Mark syscall stops; follow forks, vforks, clones and execs; kill traced processes when the tracer ends.
_OPTIONS = 0x01 | 0x02 | 0x04 | 0x08 | 0x10 | 0x80 | 0x100000

_PR_SET_NO_NEW_PRIVS = 38
_SYS_SECCOMP, _SET_MODE_FILTER, _TSYNC = 317, 1, 1
_ALLOW, _TRACE = 0x7FFF0000, 0x7FF00000
_AUDIT_ARCH_X86_64 = 0xC000003E
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.syscall.restype = ctypes.c_long


class Registers(ctypes.Structure):
    """Registers of a stopped thread: x86-64's `struct user_regs_struct`."""

    _fields_ = [
        (name, ctypes.c_ulong)
        for name in [
            "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi",
            "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs",
        ]
    ]  # fmt: skip

    @property
    def number(self) -> int:
        """Number of the system call."""
        return int(self.orig_rax)

    @property
    def arguments(self) -> tuple[int, ...]:
        """The six argument registers."""
        return tuple(int(value) for value in (self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9))

    @property
    def result(self) -> int:
        """Return value, or a negative errno."""
        return ctypes.c_long(self.rax).value

    def skip(self, result: int) -> None:
        """Skip the system call, which returns `result`."""
        self.orig_rax = ctypes.c_ulong(-1).value
        self.rax = ctypes.c_ulong(result).value


def obstacle() -> str | None:
    """Return what prevents the tracing of system calls here, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"tracing needs Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    if not _may_trace():
        return (
            "ptrace is forbidden here, so no system call can be traced: allow it in the container's settings "
            "(docker run --cap-add SYS_PTRACE), or set kernel.yama.ptrace_scope to 1 or less"
        )
    return None


@functools.cache
def _may_trace() -> bool:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        try:
            seize(child.pid)
        except OSError:
            return False
        finally:
            child.kill()
    return True


def install_filter(numbers: Iterable[int], creating: Iterable[tuple[int, int]], create_bits: int) -> None:
    """Install a seccomp filter that stops this process, its threads and children at system calls.

    Calls in `creating` stop only if the flags at the given position have one of `create_bits`.
    """
    rules = [_rule(number, None, 0) for number in numbers]
    rules += [_rule(number, argument, create_bits) for number, argument in creating]
    program = [_code(_LOAD, _ARCH_AT), _code(_EQUAL, _AUDIT_ARCH_X86_64, 1, 0), _code(_RETURN, _ALLOW)]
    program += [code for rule in rules for code in rule]
    program.append(_code(_RETURN, _ALLOW))
    text = b"".join(program)
    buffer = ctypes.create_string_buffer(text, len(text))
    description = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer)))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    number = ctypes.c_long(_SYS_SECCOMP)
    _check(_libc.syscall(number, ctypes.c_long(_SET_MODE_FILTER), ctypes.c_long(_TSYNC), description))


def _rule(number: int, argument: int | None, bits: int) -> list[bytes]:
    trace = _code(_RETURN, _TRACE)
    load = _code(_LOAD, _NUMBER_AT)
    if argument is None:
        return [load, _code(_EQUAL, number, 0, 1), trace]
    flags = _code(_LOAD, _ARGUMENTS_AT + 8 * argument)
    return [load, _code(_EQUAL, number, 0, 3), flags, _code(_ANY_BIT, bits, 0, 1), trace]


def _code(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def seize(pid: int) -> None:
    """Trace a child and its descendants; OSError if forbidden."""
    _ptrace(_SEIZE, pid, _OPTIONS)


def resume(tid: int, number: int = 0) -> None:
    """Resume a stopped thread, and deliver a signal unless 0."""
    _ptrace(_CONT, tid, number)


def to_syscall_exit(tid: int) -> None:
    """Resume a stopped thread until its system call returns."""
    _ptrace(_SYSCALL, tid, 0)


def listen(tid: int) -> None:
    """Leave a thread stopped by a signal until SIGCONT."""
    _ptrace(_LISTEN, tid, 0)


def registers(tid: int) -> Registers:
    """Read a stopped thread's registers."""
    found = Registers()
    _check(_libc.ptrace(_GETREGS, tid, None, ctypes.addressof(found)))
    return found


def set_registers(tid: int, values: Registers) -> None:
    """Write a stopped thread's registers."""
    _check(_libc.ptrace(_SETREGS, tid, None, ctypes.addressof(values)))


def _ptrace(request: int, tid: int, data: int) -> None:
    _check(_libc.ptrace(request, tid, None, data or None))


def _check(result: int) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
