"""Pictures of the command, of a progress bar and of who holds what for the docs, from real runs: `nox -s screenshots`.

A small job is saved on four ranks twice, one bit of a copy is flipped, and each command runs on what is there.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text
from torch.distributed.device_mesh import init_device_mesh

from dcp_all import FileSystemWriter, run_command, save, visualize
from dcp_inspect.visuals import progress_bar
from dcp_ranks.testing.ranks import RankPool

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

__all__ = ["main"]

WIDTH = 104
IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
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
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for step, rate in ((100, 3e-4), (200, 1e-4)):
        weights = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in model.state_dict().items()}
        state = {"model": weights, "step": step, "lr": rate}
        save(state, storage_writer=FileSystemWriter(f"{folder}/step-{step}"))
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.mul_(1.01)


def make(folder: Path) -> None:
    """The checkpoints that the commands look at."""
    with RankPool(timeout_seconds=300) as pool:
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
    # Again, since the command leaves it to the terminal to wrap a long line, and a picture would cut it.
    wrapped = Console(record=True, width=WIDTH, force_terminal=True, highlight=False, file=io.StringIO())
    wrapped.print(Text.from_ansi(screen.export_text(styles=True)))
    return wrapped.export_svg(title=f"dcp {name}", unique_id=f"dcp-{name}")


def holders() -> str:
    """Who holds what of a model on a mesh, as SVG."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor_parallel"))

    def put(*shape: int, on: Sequence[Placement]) -> torch.Tensor:
        return distribute_tensor(torch.zeros(*shape), mesh, on)

    layers = {
        f"layers.{number}.{name}": put(512, 512, on=placements)
        for number in range(12)
        for name, placements in (("attention.weight", [Shard(0), Shard(1)]), ("output.weight", [Shard(0), Shard(0)]))
    }
    norms = {f"layers.{number}.norm.weight": put(512, on=[Shard(0), Replicate()]) for number in range(12)}
    model = {"embedding.weight": put(2048, 512, on=[Shard(0), Shard(0)]), **layers, **norms}
    return visualize({"model": model, "positions": torch.zeros(2048, 64), "step": 200, "lr": 3e-4}).svg


class BarOnly:
    """Keeps what a bar shows about the middle of a save, instead of a terminal."""

    def __init__(self) -> None:
        self.last = Console(record=True)

    def width(self) -> int:
        return WIDTH

    def draw(self, line: Callable[[Any], object]) -> None:
        screen = Console(record=True, width=WIDTH, force_terminal=True, file=io.StringIO())
        line(screen)
        done, everything = map(float, re.findall(r"([\d.]+)/([\d.]+) MiB", screen.export_text(clear=False))[0])
        if done < 0.7 * everything:
            self.last = screen

    def clear(self) -> None: ...


def bar(folder: Path) -> str:
    """The bar of a save, as it was in the middle of it, as SVG."""
    shown = BarOnly()
    state = {f"layer {number}": torch.zeros(16 << 20) for number in range(8)}
    with (
        mock.patch.object(progress_bar, "AFTER_SECONDS", 0),
        mock.patch.object(progress_bar, "PAUSE_SECONDS", 0),
        mock.patch("dcp_base.progress.INTERVAL_SECONDS", 0.02),
        mock.patch.object(progress_bar, "_screen", return_value=shown),
        mock.patch("dcp_base.registry.find_screen", return_value="terminal"),
    ):
        save(state, storage_writer=FileSystemWriter(folder / "step-200"))
    return shown.last.export_svg(title="python train.py", unique_id="dcp-progress")


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
        (IMAGES / "progress.svg").write_text(bar(folder), encoding="utf-8")
    with RankPool() as pool:
        (IMAGES / "visualize.svg").write_text(pool.run(RANKS, holders)[0], encoding="utf-8")
    print(f"{len(COMMANDS) + 3} pictures in {IMAGES}", file=sys.stderr)


if __name__ == "__main__":
    main()
