"""The script of the page on Ray Train: stopped and continued on other numbers of workers, as one run without stops."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="needs ray[train]: nox -s frameworks")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks" / "ray.md"
SCRIPT = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def train(folder: Path, workers: int, steps: int) -> list[dict[str, float]]:
    """Run the page's script; returns the metrics of the steps that are in the checkpoints of this run."""
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text("\n".join(SCRIPT.findall(PAGE.read_text())))
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, script, str(workers), str(steps)],
        cwd=folder,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"step"')]


@pytest.mark.timeout(2400)  # Ray starts a dozen processes for each run: minutes on a busy machine
def test_a_run_goes_on_on_other_numbers_of_workers(tmp_path: Path) -> None:
    (whole,) = train(tmp_path / "whole", 1, 6)
    last = [train(tmp_path / "parts", workers, steps)[0] for workers, steps in ((2, 2), (4, 4), (1, 6))]
    assert [(each["step"], each["workers"]) for each in last] == [(2, 2), (4, 4), (6, 1)]
    assert last[-1]["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    kept = sorted(path.name for path in (tmp_path / "parts" / "runs" / "example").glob("step-*"))
    assert kept == ["step-4", "step-6"]
