"""`PromoterProcess`: a trainer's promoter process, its events and log."""

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

from dcp_base import CheckpointEvent, installed
from dcp_base.logs import library_logger

_log = library_logger(__name__)

END = b"\x04"
"""Last input from a trainer, since forked children may hold the pipe longer."""
LOG_FORMAT = "%(levelname)s:%(message)s"
"""On standard error with `--events`."""
_LEVELS = {logging.getLevelName(level): level for level in (10, 20, 30, 40, 50)}


class PromoterProcess:
    """Promoter process of one run, in a separate session: signals for the trainer do not end it. Ranks: one.

    It holds none of the trainer's pipes and terminals. While the trainer lives, it logs through the trainer's
    `logging`. After the trainer's end, it exits after `progress_timeout_seconds` without progress.
    """

    def __init__(self, url: str, progress_timeout_seconds: float) -> None:
        self._url = url
        self._progress_timeout_seconds = progress_timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def start(self, description: bytes) -> None:
        """Start the process, unless it runs, for tiers as TOML, since a file may be replaced. Raises OSError."""
        process = self._running()
        if process is not None:
            return
        self._forget()
        command = [sys.executable, "-m", "dcp_tiers.promote", self._url, "--follow", "--events"]
        process = self._process = subprocess.Popen(  # noqa: S603 - our own module, by this interpreter
            [
                *command,
                f"--description={description.decode()}",
                "--progress-timeout-seconds",
                str(self._progress_timeout_seconds),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._owner = os.getpid()
        if process.stdin is not None:  # a stopped promoter must not delay the trainer
            os.set_blocking(process.stdin.fileno(), False)
        _read(process.stdout, _emit, "dcp-tiers events")
        _read(process.stderr, _relay, "dcp-tiers log")

    def wake(self) -> bool:
        """Request a look for checkpoints; return False if it does not run."""
        process = self._running()
        if process is None or process.stdin is None or process.stdin.closed:
            return False
        try:
            os.write(process.stdin.fileno(), b"saved\n")
        except BlockingIOError:  # the process has not read earlier requests yet
            return True
        except OSError:
            return False
        return True

    def end(self, timeout_seconds: float | None) -> bool:
        """Wait until all is promoted; return False after `timeout_seconds`."""
        process = self._running()
        if process is None:
            return True
        if process.stdin is not None and not process.stdin.closed:
            with contextlib.suppress(OSError):
                os.write(process.stdin.fileno(), END)
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def leave(self) -> None:
        """Detach from the process; `start` starts another."""
        process = self._running()
        self._forget()
        if process is not None:
            # The thread collects the exit code, so that there is no zombie.
            threading.Thread(target=process.wait, daemon=True).start()

    def _running(self) -> subprocess.Popen[bytes] | None:
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
    def read() -> None:
        if stream is not None:
            with stream:
                take(stream)

    threading.Thread(target=read, name=name, daemon=True).start()


class EventWriter:
    """Write events as lines to a pipe, without blocking: an event is dropped if it is full or has no reader."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, event: CheckpointEvent) -> None:
        """Write or drop an event."""
        line = json.dumps(dataclasses.asdict(event)).encode() + b"\n"
        # A pipe that is ready takes PIPE_BUF bytes whole, without waiting.
        if len(line) <= select.PIPE_BUF and select.select([], [self._descriptor], [], 0)[1]:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, line)


def _emit(lines: Iterable[bytes]) -> None:
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            installed.emit(CheckpointEvent(**json.loads(line)))


def _relay(lines: Iterable[bytes]) -> None:
    for line in lines:
        whole = line.decode(errors="replace").rstrip("\n")
        name, _, text = whole.partition(":")
        if name not in _LEVELS:
            name, text = "WARNING", whole
        if text.strip():
            _log.log(_LEVELS[name], "promoter: %s", text)
