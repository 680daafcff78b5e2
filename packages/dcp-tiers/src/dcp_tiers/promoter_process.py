"""`PromoterProcess`: starts, wakes and ends the promoter process of a trainer, and reads its events."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterable

from dcp_hooks import CheckpointEvent, installed

__all__ = ["EventWriter", "PromoterProcess"]


class PromoterProcess:
    """Promoter process of one run, in a session of its own, so that signals for the trainer do not end it.

    Args:
        url: Path or URI of the first tier, which has `run.tiers.toml`.
        patience_seconds: Time without progress after which the process gives up, once the trainer has ended.

    Ranks: one.
    """

    def __init__(self, url: str, patience_seconds: float) -> None:
        self._url = url
        self._patience_seconds = patience_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless it runs.

        Raises:
            OSError: The process cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self._forget()
        command = [sys.executable, "-m", "dcp_tiers.promote", self._url, "--follow", "--events"]
        process = self._process = subprocess.Popen(  # noqa: S603 - our own module, by this interpreter
            [*command, "--seconds", str(self._patience_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        threading.Thread(target=_read, args=(process,), name="dcp-tiers events", daemon=True).start()

    def wake(self) -> bool:
        """Make the process look for new checkpoints; returns False if it does not run."""
        process = self._process
        if process is None or process.stdin is None or process.poll() is not None:
            return False
        try:
            process.stdin.write(b"saved\n")
            process.stdin.flush()
        except OSError:
            return False
        return True

    def end(self, seconds: float | None) -> bool:
        """Wait until the process has promoted what waits and ended; returns False if it goes on after `seconds`."""
        process, self._process = self._process, None
        if process is None:
            return True
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            # The thread collects the exit code, so that no zombie is left.
            threading.Thread(target=process.wait, daemon=True).start()
            return False
        return True

    def _forget(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def _read(process: subprocess.Popen[bytes]) -> None:
    if process.stdout is not None:
        with process.stdout:
            _emit(process.stdout)


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
