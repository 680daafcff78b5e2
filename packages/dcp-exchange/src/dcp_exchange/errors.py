"""Errors of exchanges."""

from __future__ import annotations

from dcp_core import DcpError

__all__ = ["ExchangeError", "ExchangeTimeoutError"]


class ExchangeError(DcpError, ConnectionError):
    """The ranks of a load could not pass on to each other what they have read."""


class ExchangeTimeoutError(ExchangeError, TimeoutError):
    """Other ranks have sent nothing for the timeout of the load."""
