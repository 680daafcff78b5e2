"""Errors of exchanges."""

from __future__ import annotations

from typing import Any

from dcp_core import DcpError

__all__ = ["ExchangeError", "ExchangeInterruptedError", "ExchangeTimeoutError"]


class ExchangeError(DcpError, ConnectionError):
    """The ranks of a load could not pass on to each other what they have read."""


class ExchangeTimeoutError(ExchangeError, TimeoutError):
    """Other ranks have sent nothing for the timeout of the load."""


class ExchangeInterruptedError(ExchangeError):
    """Another rank has failed, whose error is the one to look at.

    Attributes:
        replaced: Whether it stopped because a newer save has replaced the checkpoint.
    """

    def __init__(self, reason: str, *, replaced: bool = False) -> None:
        super().__init__(reason)
        self.replaced = replaced

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (str(self), self.replaced)


def _revive(reason: str, replaced: bool) -> ExchangeInterruptedError:
    return ExchangeInterruptedError(reason, replaced=replaced)
