"""Stopping, killing or failing a process at exactly its n-th call that could change or read the storage.

Every function of `os` by which the storage is used is replaced in the process that `intercepted` runs in: whoever calls
it is counted, whatever package it belongs to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

__all__ = ["READS", "WRITES", "Calls", "Strike", "intercepted"]

WRITES = (
    "open", "write", "pwrite", "writev", "pwritev", "ftruncate", "truncate", "fsync", "fdatasync", "close", "replace",
    "rename", "link", "symlink", "unlink", "remove", "mkdir", "makedirs", "rmdir", "utime",
)  # fmt: skip
READS = ("open", "preadv", "pread", "read", "scandir", "listdir", "stat", "fstat")

What = Literal["kill", "torn", "stop", "fail", "full"]


@dataclass(frozen=True)
class Strike:
    """What happens at which call.

    `kill`: SIGKILL before it. `torn`: SIGKILL with half done, if it writes. `stop`: SIGSTOP before it. `fail`: EIO
    once. `full`: ENOSPC from then on, whenever something is written.
    """

    at: int
    what: What


@dataclass
class Calls:
    """The calls so far, by name."""

    names: list[str] = field(default_factory=list)


@contextlib.contextmanager
def intercepted(strike: Strike | None, names: tuple[str, ...] = WRITES) -> Iterator[Calls]:
    """Count the calls of this process in the body; strike when it is time."""
    calls = Calls()
    with contextlib.ExitStack() as patches:
        for name in names:
            wrapper = _wrapper(name, getattr(os, name), calls, strike, only_new=names is WRITES)
            patches.enter_context(mock.patch.object(os, name, wrapper))
        yield calls


def _wrapper(
    name: str, real: Callable[..., Any], calls: Calls, strike: Strike | None, *, only_new: bool
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # Opening what is there changes nothing.
        if only_new and name == "open" and not args[1] & os.O_CREAT:
            return real(*args, **kwargs)
        calls.names.append(name)
        if strike is not None:
            _strike(strike, len(calls.names), name, args)
        return real(*args, **kwargs)

    return call


def _strike(strike: Strike, number: int, name: str, args: tuple[Any, ...]) -> None:
    if strike.what == "full" and number >= strike.at and name in {"open", "pwritev", "write", "pwrite", "mkdir"}:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if number != strike.at:
        return
    if strike.what == "fail":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    if strike.what == "torn" and name == "pwritev":
        descriptor, buffers, offset = args
        data = b"".join(buffers)
        os.pwrite(descriptor, data[: len(data) // 2], offset)
    if strike.what in {"kill", "torn"}:
        os.kill(os.getpid(), signal.SIGKILL)
    if strike.what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
