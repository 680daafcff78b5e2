"""A loop that trains a convolutional network: accumulated gradients, a gradient scaler, an average of the weights."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import dcp_all as dcp
from integration_tests.resume.parts import Buffers, EpochSampler, Images, ranks, seed_all, state_of_generators, wrapped

__all__ = ["OMISSIONS", "ResumableVision", "Vision"]

IMAGES, BATCH, ACCUMULATED = 24, 2, 2
GLOBAL_BATCH = 4
OMISSIONS = (
    *("scheduler", "scaler", "ema", "batchnorm", "accumulation", "epoch", "position"),
    *("numpy-rng", "one-rank-rng", "worker-seeds"),
)


class Vision:
    """The loop, without one part of its state in the checkpoint if `omit` names it."""

    def __init__(self, root: str, *, omit: str | None = None, workers: int = 0) -> None:
        self.root, self.omit = root, omit
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
            *(nn.Dropout(0.2), nn.Linear(4 * 36, 4)),
        )
        self.model: Any = wrapped(model) if ranks()[1] > 1 else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.images = Images(IMAGES, by_worker=omit == "worker-seeds")
        self.sampler = EpochSampler(IMAGES, seed=3)
        self.loader = DataLoader(
            *(self.images, BATCH),
            sampler=self.sampler,
            num_workers=workers,
            generator=torch.Generator().manual_seed(0),
        )
        self.epoch = self.position = self.micro = 0
        self.batches: Any = None
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        seed_all(7)

    def _next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.batches is None:
            self.sampler.set_epoch(self.epoch)
            self.images.epoch = self.epoch
            self.sampler.position = self.position * BATCH
            self.batches = iter(self.loader)
        try:
            found: tuple[torch.Tensor, torch.Tensor] = next(self.batches)
        except StopIteration:
            self.epoch, self.position, self.batches = self.epoch + 1, 0, None
            return self._next_batch()
        self.position += 1
        return found

    def step(self) -> torch.Tensor:
        images, labels = self._next_batch()
        if np.random.random() < 0.5:
            images = images.flip(-1)
        last = self.micro == ACCUMULATED - 1
        waits = isinstance(self.model, DistributedDataParallel) and not last
        with self.model.no_sync() if waits else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(self.model(images), labels)
            self.scaler.scale(loss / ACCUMULATED).backward()
        self.micro += 1
        if last:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=False)
            self.ema.update_parameters(getattr(self.model, "module", self.model))
            self.micro = 0
        return loss.detach()

    def _state(self) -> dict[str, Any]:
        model = getattr(self.model, "module", self.model)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        parts = {
            "scaler": self.scaler,
            "ema": dcp.PerRank(self.ema),  # averages of the rank's own BatchNorm are in it
            "accumulation": dcp.PerRank(gradients),
            "random": state_of_generators(self.omit),
            "norms": dcp.PerRank(Buffers(model)),
            "epoch": self.epoch,
            "position": self.position,
            "micro": self.micro,
            **self._data_state(),
        }
        without = {"batchnorm": ("norms",), "accumulation": ("accumulation", "micro")}.get(
            self.omit or "", (self.omit,)
        )
        kept = {name: value for name, value in parts.items() if name not in without}
        scheduler = None if self.omit == "scheduler" else self.scheduler
        if self.omit == "batchnorm":
            model = nn.ParameterList(model.parameters())
        return {"app": dcp.app_state(model, self.optimizer, scheduler=scheduler, **kept)}

    def _data_state(self) -> dict[str, Any]:
        return {}

    def save(self) -> None:
        dcp.save(self._state(), checkpoint_id=f"{self.root}/checkpoint")

    def restore(self) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=f"{self.root}/checkpoint")
        app = state["app"]
        for name in ("epoch", "position", "micro"):
            if name in app:
                setattr(self, name, app[name])


class ResumableVision(Vision):
    """The same with a `ResumableSampler`, which goes on with the same global batches on other numbers of ranks.

    Its epoch and position are left out with `omit="position"`.
    """

    def __init__(self, root: str, *, omit: str | None = None, workers: int = 0) -> None:
        super().__init__(root, omit=omit)
        self.data = dcp.ResumableSampler(IMAGES, GLOBAL_BATCH, seed=3)
        self.loader: Any = self.data.loader(self.images, num_workers=workers)

    def _next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.batches is None:
            self.images.epoch = self.data.epoch
            self.batches = iter(self.loader)
        found: tuple[torch.Tensor, torch.Tensor] | None = next(self.batches, None)
        if found is None:
            self.batches = None
            return self._next_batch()
        return found

    def _data_state(self) -> dict[str, Any]:
        return {} if self.omit == "position" else {"data": self.data}
