"""Cooperative loads: each stored byte is read once, by one rank, and passed on to the other ranks that want the byte.

`dcp_core` knows what each rank wants, `dcp_io` reads and checks bytes, `dcp_ranks` connects ranks. `dcp_core.load`
finds this package by its entry point: programs need not import it. Names are imported on first use, as a program that
looks for plug-ins imports this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks import import_lazily

if TYPE_CHECKING:
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

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_exchange.assignment.assign": ("assign",),
        "dcp_exchange.assignment.assignment": ("Assignment", "count_crossing_bytes", "subtract_pieces"),
        "dcp_exchange.errors": ("ExchangeError", "ExchangeInterruptedError", "ExchangeTimeoutError"),
        "dcp_exchange.together": ("read_together",),
        "dcp_exchange.topology": ("Topology",),
    },
)
