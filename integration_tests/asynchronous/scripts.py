"""Trainers as scripts in processes of their own, which can be killed and looked at from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": "1"}


def run(script: str, folder: Path, *, timeout: float = 240, prefix: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    path = folder / "trainer.py"
    path.write_text(script)
    command = ["bash", "-c", f"{prefix} exec {sys.executable} {path}"]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=timeout
    )


@contextlib.contextmanager
def running(script: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A script that runs; its output can be read line by line. It is killed at the end."""
    path = folder / "trainer.py"
    path.write_text(script)
    with subprocess.Popen(
        [sys.executable, str(path)], cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    """The next line that a script prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def eventually(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def end(process: subprocess.Popen[str], how: signal.Signals) -> None:
    """Send a signal and wait for the end."""
    process.send_signal(how)
    process.wait(120)
