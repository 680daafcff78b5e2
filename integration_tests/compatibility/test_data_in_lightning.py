"""Lightning's Trainer saves and loads the position of a `ResumableLoader` by itself, in the middle of an epoch too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp

pytest.importorskip("lightning.pytorch", reason="nox -s frameworks installs Lightning")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice


def trained_on(folder: Path, steps: int, workers: int, checkpoint: Path | None = None) -> list[list[int]]:
    """The samples of each step up to step `steps`."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(LightningModule):  # type: ignore[misc] # of a framework that mypy does not see
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[list[int]] = []

        def train_dataloader(self) -> Any:
            dataset: Any = torch.arange(40.0).unsqueeze(1)
            return dcp.ResumableSampler(dataset, 8, seed=1).loader(dataset, num_workers=workers)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            self.seen.append(batch.flatten().int().tolist())
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    model = Model()
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")],
    )
    trainer.fit(model, ckpt_path=checkpoint)
    return model.seen


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainer_goes_on_with_what_is_left_of_an_epoch(tmp_path: Path, workers: int) -> None:
    whole = trained_on(tmp_path / "whole", 12, workers)
    assert sorted(sample for step in whole[:5] for sample in step) == [*range(40)]
    for stop in (3, 5, 7):  # in an epoch, at its end, in the next
        folder = tmp_path / f"stopped after {stop}"
        first = trained_on(folder, stop, workers)
        rest = trained_on(folder / "resumed", 12, workers, folder / f"step={stop}.ckpt")
        assert first + rest == whole
