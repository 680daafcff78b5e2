"""A file system of a few megabytes, for tests of a full disk."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["mounted"]


@contextlib.contextmanager
def mounted(place: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of a size such as `20m` at a new directory; skips the test where that is not possible."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs the command mount")
    if done.returncode:
        pytest.skip(f"needs to mount a file system: {done.stderr.strip()}")
    yield place
    assert ctypes.CDLL(None).umount2(os.fsencode(place), 0) == 0
