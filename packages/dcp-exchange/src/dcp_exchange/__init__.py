"""Cooperative loads: one rank reads each stored byte and passes it on to the other ranks that want it."""

from dcp_exchange.errors import ExchangeError

__all__ = ["ExchangeError"]
