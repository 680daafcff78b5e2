"""Handle of a `RankPool` for one rank process: start, messages, timeout and end of the process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
from typing import Any

from dcp_ranks.testing.rank_messages import read_message, send_message
from dcp_ranks.testing.rank_starter import shared_starter

__all__ = ["RankProcess"]

_SHOWN_BYTES = 16 << 10
_ABORT_SECONDS = 20.0


class RankProcess:
    """Handle of one rank process, which runs `dcp_ranks.testing.rank_worker`; see `rank_starter`.

    Stdout and stderr of the process are written to a file; see `output`.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.connection = ours
        self._output = tempfile.TemporaryFile(prefix="dcp-rank-")  # noqa: SIM115 - open as long as the process
        self._shown_from = 0
        with theirs:
            self._process = shared_starter().start(theirs.fileno(), self._output.fileno())
        self._kill_timer: threading.Timer | None = None

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def send(self, message: object) -> None:
        """Send a message to the process; does nothing if it has ended: the next `read` then raises EOFError."""
        with contextlib.suppress(ConnectionError):
            send_message(self.connection, message)

    def read(self) -> Any:
        """Wait for the next message of the process, and return it.

        Raises:
            EOFError: The process has ended.
        """
        return read_message(self.connection)

    def mark_output(self) -> None:
        """Mark the current end of the process's output, so that `output` returns only later text."""
        self._shown_from = os.fstat(self._output.fileno()).st_size

    def output(self) -> str:
        """Return the process's stdout and stderr since `mark_output`; only the end if the text is long."""
        size = os.fstat(self._output.fileno()).st_size
        start = max(self._shown_from, size - _SHOWN_BYTES)
        return os.pread(self._output.fileno(), size - start, start).decode(errors="replace")

    def kill_after(self, seconds: float) -> None:
        """Kill the process (SIGKILL) after `seconds`, unless `keep` is called before."""
        self._kill_timer = threading.Timer(seconds, self._process.kill)
        self._kill_timer.start()

    def keep(self) -> None:
        """Cancel a kill that `kill_after` has scheduled."""
        if self._kill_timer is not None:
            self._kill_timer.cancel()
            self._kill_timer = None

    def how_it_ended(self) -> str:
        """Return a text about the end of the process, such as `exited with status 1`; waits briefly for the end."""
        try:
            code = self._process.wait(_ABORT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection, but is still running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def abort(self) -> None:
        """End a stuck process with SIGABRT, on which the process prints its stacks."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ABORT_SECONDS)
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the process, and close its connection and output file."""
        self.keep()
        self.connection.close()
        self._process.kill()
        self._process.wait()
        self._output.close()
