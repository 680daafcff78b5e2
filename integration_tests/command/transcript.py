"""What a new user would type, on good, damaged, foreign and missing input, with what is said and the exit codes.

`python -m integration_tests.command.transcript` writes `transcript.txt` anew; a test compares it with real runs.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from dcp_all import run_command

__all__ = ["PATH", "record"]

PATH = Path(__file__).with_name("transcript.txt")
GOLDEN = Path(__file__).parents[1] / "golden"
COMMANDS = """
ls .
ls nowhere
ls file.pt
ls xyz://bucket/x
show good
show stock
show file.pt
show folder.hf
show damaged
show newer
show text.txt
show nowhere
show .
show good model.*
cat good model.weight[0:2]
cat good step
cat good model.wieght
cat folder.hf w
cat file.pt w[5]
verify good
verify stock
verify damaged
verify flipped
verify short
verify nowhere
verify file.pt
verify s3://bucket/x?versionId=3
diff good stock
diff good good
diff good file.pt --keys-only
diff good nowhere
convert file.pt out.safetensors
convert good out.safetensors
convert good again.pt
convert good again.pt
convert again.pt new
diff good new
convert text.txt x.pt
convert flipped x.pt
plan good --world 2
plan good --world 0
rm new --part list.1
rm new --part list --part model.weight --dry-run
rm new --part list --force
rm new --part list --yes
rm new --dry-run
rm new --yes
rm new --yes
prune . --keep 9 --dry-run
prune file.pt --keep 1
rm s3://
rm s3:/bucket/x
convert good s3://bucket/x.pt
nonsense
"""


def make(folder: Path) -> None:
    """Good, damaged, foreign input."""
    shutil.copytree(GOLDEN / "format-1.0" / "torch", folder / "good")
    shutil.copytree(GOLDEN / "stock" / "torch-2.13.0", folder / "stock")
    for name in ("damaged", "flipped", "short", "newer"):
        shutil.copytree(folder / "good", folder / name)
    index = (folder / "damaged" / ".metadata").read_bytes()
    (folder / "damaged" / ".metadata").write_bytes(index[:-40])
    (data,) = (folder / "flipped").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[40_000] ^= 1
    data.write_bytes(content)
    (data,) = (folder / "short").glob("*.distcp")
    os.truncate(data, 50_000)
    newer(folder / "newer" / ".metadata")
    torch.save({"w": torch.arange(4.0)}, folder / "file.pt")
    (folder / "folder.hf").mkdir()
    save_file({"w": torch.arange(4.0)}, folder / "folder.hf" / "model.safetensors")
    (folder / "text.txt").write_text("not a checkpoint")
    for number, name in enumerate(("stock", "short", "newer", "good", "flipped", "damaged")):
        for path in (folder / name).iterdir():
            os.utime(path, (1_700_000_000 + number,) * 2)


def newer(path: Path) -> None:
    """Make an index say that a later major version wrote it."""
    from dcp_manifest.file.blob import FOOTER_BYTES, MAJOR, read_footer

    data = path.read_bytes()
    footer = read_footer(data[-FOOTER_BYTES:], size=len(data), file=str(path))
    assert footer is not None
    path.write_bytes(data[:-FOOTER_BYTES] + replace(footer, major=MAJOR + 1).to_bytes())


def record() -> str:
    """The transcript of all commands, run in a new folder; what changes from run to run is left out."""
    before = Path.cwd()
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch))
        os.chdir(scratch)
        try:
            for command in COMMANDS.strip().splitlines():
                said = io.StringIO()
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    code = run_command(command.split())
                text = said.getvalue().replace(str(Path(scratch).resolve()), "/tmp/here").replace(scratch, "/tmp/here")
                text = re.sub(r" +\d+ (d|h|min|s)(?=  )", "  AGE", text)
                lines += [f"$ dcp {command}", *(line.rstrip() for line in text.splitlines()), f"[{code}]", ""]
        finally:
            os.chdir(before)
    return "\n".join(lines)


if __name__ == "__main__":
    PATH.write_text(record(), encoding="utf-8")
