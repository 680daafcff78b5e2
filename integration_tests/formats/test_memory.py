"""Conversions take little memory, however large what they convert is: row 12 of what users suffer from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dcp_all as dcp

MIB = 1 << 20
LIMIT_MIB = 64
SCRIPT = """
import json, sys, warnings
import dcp_all as dcp
import dcp_format.converters
from integration_tests.weaknesses.memory import extra_mib
dcp.convert(sys.argv[3], sys.argv[3] + "-warm", format=sys.argv[4])
print(json.dumps(extra_mib(lambda: dcp.convert(sys.argv[1], sys.argv[2], format=sys.argv[4]))))
"""


def sources(folder: Path, rows: int) -> None:
    """One large matrix, and middling ones: by columns, by rows, in a file, in safetensors."""
    state = {"large": torch.randn(rows * 8, 1024), **{f"w{n}": torch.randn(rows, 1024) for n in range(4)}}
    folder.mkdir()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "checkpoint"))
    torch.save(state, folder / "model.pt")
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        pytest.param("checkpoint", "torch", marks=pytest.mark.slow),
        ("checkpoint", "safetensors"),
        ("model.pt", "checkpoint"),
        pytest.param("model.safetensors", "torch", marks=pytest.mark.slow),
    ],
)
def test_conversion_is_bounded(tmp_path: Path, source: str, kind: str) -> None:
    sources(tmp_path / "large", 4096)  # 192 MiB
    sources(tmp_path / "small", 64)
    arguments = [str(tmp_path / "large" / source), str(tmp_path / "out"), str(tmp_path / "small" / source), kind]
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    extra = json.loads(ran.stdout.splitlines()[-1])
    assert 0 <= extra <= LIMIT_MIB
