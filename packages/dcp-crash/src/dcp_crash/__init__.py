"""The crash kit: every state of a folder that a killed process or a power loss during writes can leave.

`run_traced` runs processes with a fault at their n-th system call; `disk_states` yields the states of a disk that are
possible after a loss of power, from a recording of such a run. Needs x86-64 Linux, no privileges and no compiler.
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
