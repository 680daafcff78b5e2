"""`PromoterProcess`: starts, wakes and ends the promoter process of a trainer, and reads its events and its log."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from typing import IO

from dcp_hooks import CheckpointEvent, installed
from dcp_manifest import library_logger

__all__ = ["END", "LOG_FORMAT", "EventWriter", "PromoterProcess"]

_log = library_logger(__name__)

END = b"\x04"
"""What a trainer writes to the standard input of its promoter at its end: forked children may hold the pipe longer."""
LOG_FORMAT = "%(levelname)s:%(message)s"
"""Format of the lines that a promoter with `--events` writes to standard error."""
_LEVELS = {logging.getLevelName(level): level for level in (10, 20, 30, 40, 50)}


class PromoterProcess:
    """Promoter process of one run, in a session of its own, so that signals for the trainer do not end it.

    It holds none of the trainer's pipes and terminals: its log goes through the trainer's `logging` as long as that
    lives. A caller that waits for the end of the trainer's output does not wait for the promoter.

    Args:
        url: Path or URI of the first tier, which has `run.tiers.toml`.
        patience_seconds: Time without progress after which the process gives up, once the trainer has ended.

    Ranks: one.
    """

    def __init__(self, url: str, patience_seconds: float) -> None:
        self._url = url
        self._patience_seconds = patience_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def start(self) -> None:
        """Start the process, unless it runs.

        Raises:
            OSError: The process cannot be started.
        """
        process = self._running()
        if process is not None:
            return
        self._forget()
        command = [sys.executable, "-m", "dcp_tiers.promote", self._url, "--follow", "--events"]
        process = self._process = subprocess.Popen(  # noqa: S603 - our own module, by this interpreter
            [*command, "--seconds", str(self._patience_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._owner = os.getpid()
        if process.stdin is not None:  # a promoter that is stopped must not hold the trainer up
            os.set_blocking(process.stdin.fileno(), False)
        _read(process.stdout, _emit, "dcp-tiers events")
        _read(process.stderr, _relay, "dcp-tiers log")

    def wake(self) -> bool:
        """Make the process look for new checkpoints; returns False if it does not run."""
        process = self._running()
        if process is None or process.stdin is None or process.stdin.closed:
            return False
        try:
            os.write(process.stdin.fileno(), b"saved\n")
        except BlockingIOError:  # the process has not read what it has been told already
            return True
        except OSError:
            return False
        return True

    def end(self, seconds: float | None) -> bool:
        """Wait until the process has promoted what waits and ended; returns False if it has not after `seconds`."""
        process = self._running()
        if process is None:
            return True
        if process.stdin is not None and not process.stdin.closed:
            with contextlib.suppress(OSError):
                os.write(process.stdin.fileno(), END)
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def leave(self) -> None:
        """Leave the process alone: it goes on until everything has arrived. The next start is of another one."""
        process = self._running()
        self._forget()
        if process is not None:
            # The thread collects the exit code, so that no zombie is left.
            threading.Thread(target=process.wait, daemon=True).start()

    def _running(self) -> subprocess.Popen[bytes] | None:
        """Return the process if it runs; a forked child of the trainer has none of its own."""
        process = self._process
        if process is None or self._owner != os.getpid() or process.poll() is not None:
            return None
        return process

    def _forget(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()


def _read(stream: IO[bytes] | None, take: Callable[[Iterable[bytes]], None], name: str) -> None:
    """Pass the lines of a pipe to a function, in a thread of its own, until the pipe ends."""

    def read() -> None:
        if stream is not None:
            with stream:
                take(stream)

    threading.Thread(target=read, name=name, daemon=True).start()


class EventWriter:
    """Writer of events, a line each, to a pipe. An event that the pipe has no room for, or nobody reads, is dropped.

    Args:
        descriptor: File descriptor of the pipe.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, event: CheckpointEvent) -> None:
        """Write an event, at once or not at all: a trainer that is stopped must not hold the promoter up."""
        line = json.dumps(dataclasses.asdict(event)).encode() + b"\n"
        # A pipe that is ready takes PIPE_BUF bytes whole, without waiting.
        if len(line) <= select.PIPE_BUF and select.select([], [self._descriptor], [], 0)[1]:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, line)


def _emit(lines: Iterable[bytes]) -> None:
    """Emit the events of an `EventWriter` to the observers of this process, until the pipe ends."""
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            installed.emit(CheckpointEvent(**json.loads(line)))


def _relay(lines: Iterable[bytes]) -> None:
    """Log what a promoter has logged, with its level; a line without one, such as a traceback, as a warning."""
    for line in lines:
        whole = line.decode(errors="replace").rstrip("\n")
        name, _, text = whole.partition(":")
        if name not in _LEVELS:
            name, text = "WARNING", whole
        if text.strip():
            _log.log(_LEVELS[name], "promoter: %s", text)
