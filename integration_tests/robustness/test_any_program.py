"""`dcp-crash run` on a training script that saves to one place: our save holds, `torch.save` in place does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dcp_crash.command import main

pytestmark = [pytest.mark.traced, pytest.mark.timeout(1800)]  # each run of the script imports torch

TRAIN = """
import os
import sys
import torch
{imports}
model = {{"weight": torch.zeros(100, 100), "step": torch.zeros((), dtype=torch.int64)}}
{resume}
while model["step"] < 2:
    model["weight"] += 1
    model["step"] += 1
    {save}
torch.save(model, "result.pt")
"""
WITH_TORCH = {
    "imports": "",
    "resume": "if os.path.exists('checkpoints/model.pt'): model = torch.load('checkpoints/model.pt')",
    "save": "torch.save(model, 'checkpoints/model.pt')",
}
WITH_US = {
    "imports": "from dcp_core import CheckpointNotFoundError, load, save",
    "resume": "try: load(model, checkpoint_id='checkpoints/model')\nexcept CheckpointNotFoundError: pass",
    "save": "save(model, checkpoint_id='checkpoints/model')",
}


@pytest.fixture(params=[1, pytest.param(10, marks=pytest.mark.slow)], ids=["one", "ten"])
def points(request: pytest.FixtureRequest) -> int:
    """Number of points for each fault."""
    return request.param


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A function that tries faults in the script and returns the exit status and all trials."""
    monkeypatch.chdir(tmp_path)

    def run(parts: dict[str, str], faults: str, points: int) -> tuple[int, list[dict[str, Any]]]:
        Path("train.py").write_text(TRAIN.format(**parts))
        options = [
            "--dir",
            "checkpoints",
            "--compare",
            "result.pt",
            "--fault",
            faults,
            "--sample",
            str(points),
            "--json",
        ]
        status = main(["run", *options, "--", sys.executable, "train.py"])
        return status, json.loads(capsys.readouterr().out)["trials"]

    return run


def test_a_script_that_saves_with_us_resumes_after_each_fault(trials, points: int) -> None:
    status, found = trials(WITH_US, "kill,torn,power", points)
    assert [trial for trial in found if trial["verdict"] in {"lost", "hung"}] == []
    assert status == 0
    assert {trial["fault"] for trial in found} == {"kill", "torn", "power"}


def test_a_script_that_saves_with_torch_in_place_loses_its_state(trials, points: int) -> None:
    status, found = trials(WITH_TORCH, "torn", points)
    assert status == 1
    assert {(trial["verdict"], trial["resume"]) for trial in found} == {("lost", 1)}
