"""One checkpoint of one value: the command counts nothing as `1 values`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dcp_all import run_command
from dcp_core import save

ONE_OF_MANY = re.compile(
    r"(?<![\d.,])1 (?:[a-z]+ )?(?:values|files|checkpoints|places|tensors|objects|ranks|steps|runs)\b"
)


@pytest.mark.parametrize(
    "command",
    [
        *(["ls", "."], ["show", "step-1"], ["show", "step-1", "--depth", "1"], ["verify", "step-1"], ["verify", "."]),
        *(["diff", "step-1", "step-1"], ["diff", "step-1", "other"], ["plan", "step-1", "--world", "1"], ["du", "."]),
        *(["prune", ".", "--keep", "1", "--dry-run"], ["rm", "step-1", "--dry-run"]),
        ["convert", "step-1", "out.safetensors"],
    ],
    ids=" ".join,
)
def test_one_is_singular(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("step-1", 1.0), ("other", 2.0)):
        save({"model": {"weight": torch.full((8,), value)}}, checkpoint_id=name)
    run_command(command)
    said = "".join(capsys.readouterr())
    assert said
    assert ONE_OF_MANY.findall(said) == []
