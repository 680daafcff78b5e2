"""Crash tests of programs that write files: faults at system calls, and disk states after a power loss.

Needs x86-64 Linux, but no privileges and no compiler.
"""

from dcp_crash.disk import disk_states, snapshot
from dcp_crash.faults import Fault
from dcp_crash.running import mark, run_traced

__all__ = ["Fault", "disk_states", "mark", "run_traced", "snapshot"]
