"""The script of the page "From torch.save" resumes bit for bit, with our functions and with those of torch.save."""

from __future__ import annotations

import random
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-torch-save.md"
BLOCK = re.compile(r"^```(py|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [code for _, code in BLOCK.findall(PAGE.read_text())]
WITH_TORCH_SAVE, OURS, SCRIPT, *_ = BLOCKS


def with_torch_save() -> str:
    assert OURS in SCRIPT
    return "import os\nimport random\n" + SCRIPT.replace(OURS, WITH_TORCH_SAVE)


def run(script: str, folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the script has when it ends, as `python train.py STEPS` in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["train.py", str(steps)])
    random.seed(0)
    return runpy.run_path("train.py", run_name="__main__")


def bits(ended: dict[str, Any]) -> dict[str, Any]:
    """The values of all that a run goes on from."""
    parts = ("model", "optimizer", "scheduler", "ema", "scaler", "loader")
    states = {name: ended[name].state_dict() for name in parts}
    return {**states, "random": torch.get_rng_state(), "python": random.random(), "step": ended["step"]}


@pytest.mark.docs
@pytest.mark.parametrize("script", [SCRIPT, with_torch_save()], ids=["dcp", "torch.save"])
def test_a_resumed_run_equals_one_without_a_break(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = bits(run(script, tmp_path / "whole", 20, monkeypatch))
    losses = capsys.readouterr().out.splitlines()
    run(script, tmp_path / "broken", 10, monkeypatch)
    resumed = bits(run(script, tmp_path / "broken", 20, monkeypatch))
    assert len(losses) == 20
    assert capsys.readouterr().out.splitlines() == losses
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_the_page_shows_the_functions_of_the_script() -> None:
    assert OURS in SCRIPT
    assert "torch.save" in WITH_TORCH_SAVE


@pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")  # torchdata imports all names of torch
def test_the_data_loader_of_torchdata_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchdata", reason="nox -s frameworks installs torchdata")
    block = next(code for code in BLOCKS if "StatefulDataLoader(" in code)
    begin, end = SCRIPT.index("class Loader"), SCRIPT.index("model = torch.nn.Sequential")
    loader = block.replace("dataset", "torch.randn(256, 16)")
    script = (SCRIPT[:begin] + SCRIPT[end:]).replace("loader = Loader(torch.randn(256, 16), batch_size=32)", loader)
    script = script.replace("for batch in loader:", "for batch in (batch for _ in range(9) for batch in loader):")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(script, whole, 14, monkeypatch)["model"].state_dict()
    run(script, broken, 10, monkeypatch)
    torch.testing.assert_close(run(script, broken, 14, monkeypatch)["model"].state_dict(), expected, rtol=0, atol=0)
