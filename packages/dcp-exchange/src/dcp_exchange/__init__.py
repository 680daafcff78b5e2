"""Cooperative loads: one rank reads each stored byte and passes it on to the other ranks that want it.

`dcp_core.load` imports this package; programs need not.
"""

from dcp_exchange.errors import ExchangeError

__all__ = ["ExchangeError"]
