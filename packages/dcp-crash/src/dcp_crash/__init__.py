"""Crash tests of programs that write files: fault injection at system calls, and disk states after a power loss.

`run_traced` runs functions in processes and injects a fault at their n-th system call; `disk_states` computes from a
recorded run which states of the disk a power loss can leave. Needs x86-64 Linux, but no privileges and no compiler.
"""

from dcp_crash.disk import DiskState, disk_states, snapshot
from dcp_crash.faults import WRITING, Fault, FaultKind
from dcp_crash.recording import Change
from dcp_crash.running import RankEnd, Run, mark, run_traced

__all__ = [
    "WRITING",
    "Change",
    "DiskState",
    "Fault",
    "FaultKind",
    "RankEnd",
    "Run",
    "disk_states",
    "mark",
    "run_traced",
    "snapshot",
]
