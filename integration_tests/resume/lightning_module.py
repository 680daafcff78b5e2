"""Script for `test_prove_resume`: a Lightning module with an average of its weights; its argument is left out."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from dcp_lightning import DcpCheckpointIO
from dcp_state import RandomState

OMIT = sys.argv[1]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.ema = {name: parameter.detach().clone() for name, parameter in self.net.named_parameters()}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.net.named_parameters():
            self.ema[name].lerp_(parameter.detach(), 0.1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = {"ema": dict(self.ema), "torch-rng": RandomState().state_dict()}
        checkpoint["own"] = {name: value for name, value in own.items() if name != OMIT}
        if OMIT == "scheduler":
            checkpoint["lr_schedulers"] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["own"]

    def on_train_start(self) -> None:
        if hasattr(self, "loaded"):
            self.ema |= {name: tensor.clone() for name, tensor in self.loaded.get("ema", {}).items()}
            if "torch-rng" in self.loaded:
                RandomState().load_state_dict(self.loaded["torch-rng"])


warnings.simplefilter("ignore")
torch.manual_seed(1)
data = torch.randn(12, 4)
model = Net()
trainer = Trainer(
    max_epochs=4,
    accelerator="cpu",
    plugins=[DcpCheckpointIO()],
    callbacks=[ModelCheckpoint("run", save_last=True, every_n_epochs=1)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
loader = DataLoader(data, batch_size=4, generator=torch.Generator())
trainer.fit(model, loader, ckpt_path="last")
