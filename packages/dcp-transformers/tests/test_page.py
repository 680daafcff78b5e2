"""The scripts of the docs' page, on ranks: resumed on 2, 4 and 1 of them, and killed in the middle of a save."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

Run = Callable[..., Any]

# Runs a script, and kills this rank while it writes the checkpoint of a step: its data are there, its index is not.
KILLED = """
import os, runpy, signal, sys
import dcp_io

publish = dcp_io.LocalStore.publish
def killed(self, name, *args, **kwargs):
    if name == ".metadata" and self.url.endswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return publish(self, name, *args, **kwargs)
dcp_io.LocalStore.publish = killed
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def losses(ran: Any) -> dict[int, float]:
    """The last loss that was printed of each step."""
    found = re.findall(r"'loss': '?([\d.e-]+)'?.*?'epoch': '?([\d.e-]+)'?", ran.stdout)
    return {round(float(epoch) * 25): float(loss) for loss, epoch in found}


@pytest.fixture
def script(tmp_path: Path, page_blocks: list[str]) -> Path:
    path = tmp_path / "train.py"
    path.write_text(next(block for block in page_blocks if "Trainer(" in block))
    return path


@pytest.mark.timeout(900)  # eleven processes that import torch and transformers
def test_two_four_and_one_rank(script: Path, tmp_path: Path, run_ranks: Run) -> None:
    whole = losses(run_ranks(script, 2, STEPS="40"))
    assert sorted(whole) == list(range(1, 41))
    (tmp_path / "run").rename(tmp_path / "whole")
    (tmp_path / "killed.py").write_text(KILLED)
    # Killed while step 20 is saved; step 10 is the newest then.
    run_ranks(tmp_path / "killed.py", 2, str(script), "checkpoint-20", succeeds=False, STEPS="40")
    assert not (tmp_path / "run" / "checkpoint-20" / ".metadata").exists()
    assert (tmp_path / "run" / "checkpoint-10" / ".metadata").exists()
    resumed = losses(run_ranks(tmp_path / "killed.py", 2, str(script), "checkpoint-30", succeeds=False, STEPS="40"))
    assert resumed == {step: whole[step] for step in resumed}  # bit for bit, on as many ranks
    assert min(resumed) == 11
    four = losses(run_ranks(tmp_path / "killed.py", 4, str(script), "checkpoint-40", succeeds=False, STEPS="40"))
    one = losses(run_ranks(script, 1, STEPS="40"))
    assert (min(four), min(one), max(one)) == (21, 31, 40)
    for step, loss in {**four, **one}.items():  # dropout differs, the data do not
        assert loss == pytest.approx(whole[step], rel=0.1)


def test_the_script_with_accelerate(tmp_path: Path, page_blocks: list[str], run_ranks: Run) -> None:
    path = tmp_path / "accelerated.py"
    path.write_text(next(block for block in page_blocks if "accelerator.prepare" in block))
    for ranks in (1, 2):
        run_ranks(path, ranks)
