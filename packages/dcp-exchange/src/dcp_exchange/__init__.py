"""Cooperative loads: one rank reads each stored byte and passes it on to the other ranks that want it.

`dcp_core.load` imports `dcp_exchange.together`. Programs need not import this package.
"""

from dcp_exchange.errors import ExchangeError

__all__ = ["ExchangeError"]
