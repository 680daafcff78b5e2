"""Cooperative loads: each stored byte is read once, by one rank, and passed on to the other ranks that want the byte.

`dcp_core` knows what each rank wants, `dcp_io` reads and checks bytes, `dcp_ranks` connects ranks. `dcp_core.load`
finds this package by its entry point: programs need not import it.
"""

from dcp_exchange.assignment.assign import assign
from dcp_exchange.assignment.assignment import Assignment, count_crossing_bytes, subtract_pieces
from dcp_exchange.errors import ExchangeError, ExchangeInterruptedError, ExchangeTimeoutError
from dcp_exchange.together import read_together
from dcp_exchange.topology import Topology

__all__ = [
    "Assignment",
    "ExchangeError",
    "ExchangeInterruptedError",
    "ExchangeTimeoutError",
    "Topology",
    "assign",
    "count_crossing_bytes",
    "read_together",
    "subtract_pieces",
]
