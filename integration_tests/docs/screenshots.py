"""Pictures of the command for the docs, from real runs: `nox -s screenshots`.

A small job is saved on four ranks twice, one bit of a copy is flipped, and each command runs on what is there.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console

from dcp_all import FileSystemWriter, run_command, save
from dcp_ranks.testing.ranks import RankPool

__all__ = ["main"]

WIDTH = 104
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
RANKS = 4
COMMANDS = {
    "ls": ["ls", "runs"],
    "show": ["show", "runs/step-200", "--depth", "4"],
    "verify": ["verify", "runs/step-150"],
    "diff": ["diff", "runs/step-100", "runs/step-200"],
    "plan": ["plan", "runs/step-200", "--world", "8", "--svg", "layout.svg"],
}


def train(folder: str) -> None:
    """Two saves of a small model's tensors, sharded by rows over the ranks."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.LayerNorm(512))
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(2048, 512), "block": block})
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for step, rate in ((100, 3e-4), (200, 1e-4)):
        weights = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in model.state_dict().items()}
        state = {"model": weights, "step": step, "lr": rate}
        save(state, storage_writer=FileSystemWriter(f"{folder}/step-{step}"))
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.mul_(1.01)


def make(folder: Path) -> None:
    """The checkpoints that the commands look at."""
    with RankPool() as pool:
        pool.run(RANKS, train, str(folder / "runs"))
    shutil.copytree(folder / "runs" / "step-100", folder / "runs" / "step-150")
    data = sorted((folder / "runs" / "step-150").glob("*.distcp"))[1]
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)
    for minutes, step in ((50, 100), (30, 150), (1, 200)):
        for path in (folder / "runs" / f"step-{step}").iterdir():
            os.utime(path, (path.stat().st_mtime - 60 * minutes,) * 2)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Run the block in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def picture(name: str, arguments: list[str]) -> str:
    """What a command prints, as SVG."""
    screen = Console(record=True, width=WIDTH, force_terminal=True, highlight=False, file=io.StringIO())
    screen.print(f"[bold]$ dcp {' '.join(arguments)}[/]")
    with mock.patch("dcp_inspect.printing.output.console", return_value=screen):
        run_command(arguments)
    return screen.export_svg(title=f"dcp {name}", unique_id=f"dcp-{name}")


def main() -> None:
    """Write the pictures."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make(folder)
        with inside(folder):
            for name, arguments in COMMANDS.items():
                (IMAGES / f"command-{name}.svg").write_text(picture(name, arguments), encoding="utf-8")
            shutil.copy("layout.svg", IMAGES / "command-layout.svg")
    print(f"{len(COMMANDS) + 1} pictures in {IMAGES}", file=sys.stderr)


if __name__ == "__main__":
    main()
