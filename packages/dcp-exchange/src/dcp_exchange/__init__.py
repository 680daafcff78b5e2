"""Cooperative loads: each stored byte is read once, by one rank, and passed on to the other ranks that want the byte.

`dcp_core` knows what each rank wants, `dcp_io` reads and checks bytes, `dcp_ranks` connects ranks.
"""

from dcp_exchange.assignment.assign import assign
from dcp_exchange.assignment.assignment import Assignment, count_crossing_bytes, subtract_pieces
from dcp_exchange.topology import Topology

__all__ = ["Assignment", "Topology", "assign", "count_crossing_bytes", "subtract_pieces"]
