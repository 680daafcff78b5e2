"""`PromoterProcess`: starts, wakes and ends the process `python -m dcp_tiers.promote` of a trainer."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

__all__ = ["PromoterProcess"]

_PATIENCE_SECONDS = 3600.0


class PromoterProcess:
    """Promoter process of one run, in a session of its own, so that signals for the trainer do not end it.

    Args:
        url: Path or URI of the first tier, which has `run.tiers.toml`.

    Ranks: one.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless it runs.

        Raises:
            OSError: The process cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self._forget()
        command = [sys.executable, "-m", "dcp_tiers.promote", self._url, "--follow"]
        self._process = subprocess.Popen(  # noqa: S603 - our own module, by this interpreter
            [*command, "--seconds", str(_PATIENCE_SECONDS)], stdin=subprocess.PIPE, start_new_session=True
        )

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
