"""Errors of exchanges."""

from __future__ import annotations

import errno
from functools import partial
from typing import Any, Final

from dcp_core import DcpError

_LACKS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EFBIG, errno.EAGAIN, errno.ENOSYS}
_LACKS_OF_RUNTIME: Final = ("can't start new thread", "can't allocate memory")  # of Python, of torch


class ExchangeError(DcpError, ConnectionError):
    """The ranks of a load could not pass on bytes to each other, or sent nothing before the timeout."""


class ExchangeInterruptedError(ExchangeError):
    """The exchange stopped without an error of this rank: a connection was lost, or another rank stopped it.

    Attributes:
        replaced: Whether a newer save replaced the checkpoint.
        is_lack: Whether a rank lacks a resource.
    """

    def __init__(self, reason: str, *, replaced: bool = False, is_lack: bool = False) -> None:
        super().__init__(reason)
        self.replaced = replaced
        self.is_lack = is_lack

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), replaced=self.replaced, is_lack=self.is_lack), (str(self),)


def is_lack(error: BaseException | None) -> bool:
    """Return whether an error is a lack of memory, descriptors or threads."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _LACKS):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _LACKS_OF_RUNTIME):
            return True
        error = error.__cause__
    return False
