"""What the command says where PyTorch or dcp-format is not installed: what is missing, and only where it is needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[..., Path]

RUN_WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {sys.argv[1]!r}", name=sys.argv[1])
sys.meta_path.insert(0, Refuse())
from dcp_inspect.cli import run
for arguments in sys.argv[2:]:
    print(run(arguments.split()), file=sys.stderr)
"""
PYTORCH = "needs PyTorch, which is not installed (https://pytorch.org/get-started says how)"
FORMAT = "needs dcp-format, which is not installed: install it from the source of your other dcp packages"
COMMANDS = {
    # what is typed → exit code, what is said with {} for what is missing
    "convert good x.pt": (5, "converting {}"),
    "convert nowhere x.pt": (3, "there is nothing at nowhere: check the path"),
    "show file.pt": (5, "file.pt is of another format, and reading it {}"),
    "show model.safetensors": (5, "model.safetensors is of another format, and reading it {}"),
    "show folder.hf": (5, "folder.hf is of another format, and reading it {}"),
    "cat file.pt w": (5, "file.pt is of another format, and reading it {}"),
    "diff good file.pt": (5, "file.pt is of another format, and reading it {}"),
    "show text.txt": (5, "text.txt is no checkpoint's directory, torch.save file or safetensors file"),
    "cat empty.txt w": (5, "empty.txt is no checkpoint's directory, torch.save file or safetensors file"),
    "show nowhere": (3, "there is nothing at nowhere: check the path"),
    "cat nowhere w": (3, "there is nothing at nowhere: check the path"),
    "diff good nowhere": (3, "there is nothing at nowhere: check the path"),
    "verify file.pt": (
        5,
        "file.pt is a file, not a checkpoint's directory; files of other formats have no CRCs to verify",
    ),
}


@pytest.mark.parametrize(("module", "missing"), [("torch", PYTORCH), ("dcp_format", FORMAT)])
def test_errors_name_what_is_missing(tmp_path: Path, module: str, missing: str, write: Write) -> None:
    pytest.importorskip("dcp_format")
    write(tmp_path / "good")
    (tmp_path / "file.pt").write_bytes(b"PK\x03\x04 an archive")
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "folder.hf").mkdir()
    (tmp_path / "folder.hf" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "text.txt").write_text("neither")
    (tmp_path / "empty.txt").write_text("")
    typed = [*COMMANDS]
    ran = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT, module, *typed], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    said = ran.stderr.splitlines()
    assert ran.stdout == ""
    expected = [
        text for each in typed for text in (f"dcp: {COMMANDS[each][1]}".format(missing), str(COMMANDS[each][0]))
    ]
    assert said == expected
    assert "pip install" not in ran.stderr
