"""Stock's command line for conversions: there and back, and what it says when there is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_format.torch_save.stock_calls import main


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, middle, last = (str(tmp_path / name) for name in ("first.pt", "checkpoint", "last.pt"))
    torch.save({"w": torch.arange(3.0), "deep": {"step": 4}}, first)
    assert main(["torch_to_dcp", first, middle]) == 0
    assert main(["dcp_to_torch", middle, last]) == 0
    found = torch.load(last)
    assert found["w"].tolist() == [0, 1, 2]
    assert found["deep"] == {"step": 4}
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"Converting checkpoint from {first} to {middle} using method: 'torch_to_dcp'"


@pytest.mark.parametrize("mode", ["torch_to_dcp", "dcp_to_torch"])
def test_nothing_to_convert(mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([mode, str(tmp_path / "none"), str(tmp_path / "made")]) == 1
    assert f"No checkpoint found at {tmp_path / 'none'}. Skipping conversion." in capsys.readouterr().out
    assert not (tmp_path / "made").exists()


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sideways", "a", "b"])
    assert "torch_to_dcp" in capsys.readouterr().err
