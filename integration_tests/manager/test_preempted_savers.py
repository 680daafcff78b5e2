"""SIGTERM while a saver saves in the background: a trainer as users write it ends in time, with a valid checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dcp_all import verify_checkpoint

# What a scheduler gives before SIGKILL; the script must be over by then, whatever its saver does.
GRACE_SECONDS = 60

TRAINER = """
import sys, time
import torch
import dcp_all as dcp
from held import Held

policy = dcp.EverySteps(1000) | dcp.OnSignal()
options = dcp.SaverOptions(close_timeout_seconds=5)
state = {"w": torch.zeros(1 << 18), "step": 0}
with dcp.AsyncSaver("KIND", options=options) as saver:
    saver.warm_up(state_dict=state)
    limit = {"preemption_timeout_seconds": 15}
    manager = dcp.CheckpointManager("run", save_policy=policy, saver=saver, writer=WRITER, **limit)
    with manager:
        manager.save(0, state)
        manager.wait()
        if WRITER is not None:
            Held.armed.touch()
            manager.save(1, state)  # never ends
        print("training", flush=True)
        for step in range(2, 100_000):
            time.sleep(0.01)
            state["w"].fill_(step)
            state["step"] = step
            manager.maybe_save(step, state)
            if manager.preempted:
                print("preempted", step, flush=True)
                break
"""

HELD = """
import time
from pathlib import Path
from dcp_fs import FileSystemWriter

class Held(FileSystemWriter):
    armed = Path("armed")

    def write_data(self, plan, planner):
        if self.armed.exists():
            time.sleep(3600)
        return super().write_data(plan, planner)
"""


def _preempted(folder: Path, kind: str, writer: str) -> tuple[int, list[str], str]:
    """Run the trainer and preempt it; its status, what it printed, and its errors."""
    (folder / "held.py").write_text(HELD)
    (folder / "trainer.py").write_text(TRAINER.replace("KIND", kind).replace("WRITER", writer))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "PYTHONWARNINGS": "error"}
    with subprocess.Popen(
        [sys.executable, "trainer.py"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "training\n"
            process.send_signal(signal.SIGTERM)
            printed, errors = process.communicate(timeout=GRACE_SECONDS)
        finally:
            process.kill()
    return process.returncode, printed.splitlines(), errors


@pytest.mark.parametrize("kind", [pytest.param("thread", marks=pytest.mark.slow), "process"])
def test_the_step_of_the_signal_is_saved(tmp_path: Path, kind: str) -> None:
    status, printed, errors = _preempted(tmp_path, kind, "None")
    assert (status, errors) == (0, "")
    step = int(printed[0].removeprefix("preempted "))
    assert verify_checkpoint(tmp_path / "run" / f"step-{step}").ok
    assert (tmp_path / "run" / "latest").read_text() == f"step-{step}\n"


@pytest.mark.slow
def test_a_save_that_hangs_does_not_hold_the_end_up(tmp_path: Path) -> None:
    status, _, errors = _preempted(tmp_path, "process", "Held")
    assert status == 1
    assert "UnfinishedSaveError" in errors
    assert "preemption_timeout_seconds" in errors
    assert verify_checkpoint(tmp_path / "run" / "step-0").ok
    assert (tmp_path / "run" / "latest").read_text() == "step-0\n"
