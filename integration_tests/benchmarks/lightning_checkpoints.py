"""Bytes and seconds of a save and a load through `dcp-lightning`, beside Lightning's own, in one run.

    python -m integration_tests.benchmarks.lightning_checkpoints
    torchrun --nproc-per-node 2 -m integration_tests.benchmarks.lightning_checkpoints

One process: the plug-ins, with all state of a model and of its AdamW. Several ranks: Fabric's `ModelParallelStrategy`,
with shards of FSDP2 (Lightning's own saves them by `torch.distributed.checkpoint`).

Run by a Python that has Lightning. The contenders take turns, each round in the other order; the first round warms up.
Prints medians, and medians of the ratio of the two times of each round.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from integration_tests.benchmarks.folders import remove
from integration_tests.benchmarks.frameworks import Contender, measure

PathAct = Callable[[Path], object]
Contenders = dict[str, Contender]


def plug_ins(layers: int) -> Contenders:
    """Save and load of each plug-in in one process (12.6 MB a layer)."""
    from lightning.fabric.plugins.io import TorchCheckpointIO

    from dcp_lightning import DcpCheckpointIO

    model, optimizer = trained(_make_model(layers))
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 1}
    made = {"ours": DcpCheckpointIO(), "Lightning's own": TorchCheckpointIO()}
    return {
        name: _contender(partial(plug_in.save_checkpoint, state), partial(plug_in.load_checkpoint, map_location="cpu"))
        for name, plug_in in made.items()
    }


def strategies(layers: int) -> Contenders:
    """Save and load of Fabric's strategies, each with its own model, on the ranks of torchrun."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from dcp_lightning.fabric import DcpModelParallelStrategy

    found: Contenders = {}
    for name, kind in {"ours": DcpModelParallelStrategy, "Lightning's own": ModelParallelStrategy}.items():
        ranks = int(os.environ["WORLD_SIZE"])
        strategy = kind(lambda module, mesh: fully_shard(module, mesh=mesh["data_parallel"]), ranks, 1)
        fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
        fabric.launch()
        model, optimizer = trained(fabric.setup_module(_make_model(layers)), fabric)
        state = {"model": model, "optimizer": optimizer, "step": 1}
        found[name] = _contender(partial(fabric.save, state=state), partial(fabric.load, state=state))
    return found


def _make_model(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(layers)))


def trained(model: Any, fabric: Any = None) -> tuple[Any, Any]:
    """Return the model and its optimizer after a step."""
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if fabric is not None:
        optimizer = fabric.setup_optimizers(optimizer)
    model(torch.ones(2, 1024)).sum().backward()
    optimizer.step()
    return model, optimizer


def _contender(save: PathAct, load: PathAct) -> Contender:
    return Contender(
        lambda folder: partial(save, folder / "one.ckpt"), lambda folder: partial(load, folder / "one.ckpt")
    )


def main() -> None:
    """Measure the contenders, for one process or for the ranks of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--place", default=tempfile.gettempdir(), help="folder to save into; the same on all ranks")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning").setLevel(logging.ERROR)
    root = Path(asked.place) / f"dcp-bench-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
    root.mkdir(parents=True, exist_ok=True)
    try:
        make = strategies if "WORLD_SIZE" in os.environ else plug_ins
        measure(make(asked.layers), root, asked.rounds)
    finally:
        remove(root)
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
