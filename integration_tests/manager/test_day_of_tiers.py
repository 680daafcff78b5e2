"""A shortened day of a job with two tiers loses nothing that the policies keep, and leaves nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("hours", "seed"), [(2.4, 1), *(pytest.param(24, seed, marks=pytest.mark.slow) for seed in range(2, 5))]
)
def test_a_day(tmp_path: Path, hours: float, seed: int) -> None:
    command = [sys.executable, "-m", "integration_tests.manager.day_of_tiers", str(tmp_path), str(hours), str(seed)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["saves"] >= 4 * hours
    assert found["restarts"] > 2
    assert found["arrived"] > found["saves"] / 6
    assert hours < 24 or (found["outages"] > 1 and found["killed promoters"] > 5)
