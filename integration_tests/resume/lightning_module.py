"""Script for the proof on a Lightning module, started as by torchrun: `[OMITTED]` is not in its checkpoints.

Accumulated gradients, a gradient scaler, BatchNorm, an average of the weights, random flips by NumPy, and an order of
the data by epoch, whose position the module saves: in the second epoch, between two steps of the optimizer.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, Dataset, Sampler

from dcp_lightning import DcpCheckpointIO
from dcp_lightning.strategies import DcpDDPStrategy
from dcp_state import RandomState

OMIT = next(iter(sys.argv[1:]), None)
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BATCH, BATCHES, ACCUMULATED, SAVED = 2, 6, 2, 9
CHECKPOINT = "run.ckpt"


class Samples(Dataset[torch.Tensor]):
    """Noise, to which workers add some of their own if `by_worker`."""

    def __init__(self, *, by_worker: bool) -> None:
        self.values = torch.randn(BATCH * BATCHES * RANKS, 4, generator=torch.Generator().manual_seed(1))
        self.by_worker = by_worker

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index] + (0.1 * torch.randn(4) if self.by_worker else 0.0)


class Order(Sampler[int]):
    """A shuffle by epoch, from a position on. Lightning would set the epoch by `set_epoch`; here the module does."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(BATCH * BATCHES * RANKS, generator=torch.Generator().manual_seed(self.epoch))
        yield from order.tolist()[RANK::RANKS][self.position * BATCH :]

    def __len__(self) -> int:
        return BATCH * BATCHES  # of a whole epoch: Lightning counts what it has read before


def of_all_ranks(value: Any) -> list[Any]:
    found = [value] * RANKS
    if RANKS > 1:
        dist.all_gather_object(found, value)
    return found


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            *(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        )
        self.ema = {name: parameter.detach().clone() for name, parameter in self.net.named_parameters()}
        self.batches = 0
        self.loaded: dict[str, Any] = {}
        self.strict_loading = OMIT != "batchnorm"

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.net(-batch if np.random.random() < 0.5 else batch).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.net.named_parameters():
            self.ema[name].lerp_(parameter.detach(), 0.1)
        self.batches += 1
        order.position += 1
        if self.batches == SAVED:
            self.trainer.save_checkpoint(CHECKPOINT)

    def on_train_epoch_end(self) -> None:
        order.epoch, order.position = order.epoch + 1, 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9), "interval": "step"}
        ]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        gradients = {name: parameter.grad.clone() for name, parameter in self.net.named_parameters()}
        own = {"ema": dict(self.ema), "epoch": order.epoch, "position": order.position}
        own |= {"batchnorm": of_all_ranks(dict(self.net.named_buffers()))}
        own |= {"accumulation": of_all_ranks(gradients), "random": of_all_ranks(RandomState().state_dict())}
        checkpoint["own"] = {name: value for name, value in own.items() if name != OMIT}
        if OMIT == "scheduler":
            checkpoint["lr_schedulers"] = []
        if OMIT == "scaler":
            del checkpoint[MixedPrecision.__qualname__]
        if OMIT == "batchnorm":
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: weights[name] for name in weights if "running" not in name}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["own"]
        self.batches = SAVED
        order.epoch, order.position = self.loaded.get("epoch", 0), self.loaded.get("position", 0)

    def on_train_start(self) -> None:
        """Restore what Lightning would have overwritten before."""
        if not self.loaded:
            return
        self.ema |= {name: tensor.clone() for name, tensor in self.loaded.get("ema", {}).items()}
        for name, parameter in self.net.named_parameters():
            if "accumulation" in self.loaded:
                parameter.grad = self.loaded["accumulation"][RANK][name].clone()
        for name, buffer in self.net.named_buffers():
            if "batchnorm" in self.loaded:
                buffer.copy_(self.loaded["batchnorm"][RANK][name])
        states = self.loaded["random"][0 if OMIT == "one-rank-rng" else RANK]
        fresh = RandomState().state_dict()
        RandomState().load_state_dict(
            {name: fresh[name] if f"{name}-rng" == OMIT else state for name, state in states.items()}
        )


warnings.simplefilter("ignore")
model = Net()
torch.manual_seed(1 + RANK)
np.random.seed(1 + RANK)
order = Order()
workers = 1 if OMIT == "worker-seeds" else 0
samples = Samples(by_worker=OMIT == "worker-seeds")
loader = DataLoader(samples, BATCH, sampler=order, num_workers=workers, generator=torch.Generator().manual_seed(0))
several: dict[str, Any] = {
    "strategy": DcpDDPStrategy(process_group_backend="gloo", broadcast_buffers=False),
    "devices": RANKS,
}
trainer = Trainer(
    max_epochs=3,
    accelerator="cpu",
    accumulate_grad_batches=ACCUMULATED,
    plugins=[
        DcpCheckpointIO(),
        MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)),
    ],
    use_distributed_sampler=False,
    enable_checkpointing=False,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    **(several if RANKS > 1 else {"devices": 1}),
)
trainer.fit(model, loader, ckpt_path=CHECKPOINT if Path(CHECKPOINT).exists() else None)
