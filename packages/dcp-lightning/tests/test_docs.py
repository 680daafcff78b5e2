"""The page on Lightning and the README: their scripts run, on the ranks that they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="needs Lightning: `nox -s frameworks` installs it")

pytestmark = pytest.mark.timeout(480)

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(script: str, folder: Path, *arguments: str) -> str:
    file = folder / "script.py"
    file.write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(file), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readme(tmp_path: Path) -> None:
    (script,) = BLOCK.findall((ROOT / "packages" / "dcp-lightning" / "README.md").read_text())
    run(script, tmp_path)


def test_the_page(tmp_path: Path) -> None:
    first, sharded, newest, whole = BLOCK.findall((ROOT / "docs" / "frameworks" / "lightning.md").read_text())
    run(first, tmp_path)
    assert "step 10" in run(sharded, tmp_path, "2")
    assert "step 20" in run(sharded, tmp_path, "4", "20")
    assert "step 20" in run(newest, tmp_path)
    run(f"from dcp_lightning import DcpCheckpointIO\n{whole}\nassert len(weights) == 4", tmp_path)
