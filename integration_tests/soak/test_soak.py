"""The soak in short; the whole of it is `python -m integration_tests.soak`, and slow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(7200)
@pytest.mark.slow
@pytest.mark.parametrize("saves", [20, 500])
def test_nothing_is_lost_and_nothing_is_left(saves: int) -> None:
    """In a process of its own: it becomes the parent of whatever it leaves behind."""
    command = [sys.executable, "-m", "integration_tests.soak", "--saves", str(saves), "--seed", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f'"saves": {saves},' in done.stdout
