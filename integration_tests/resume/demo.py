"""The training of the demo as a trainer that the proof can step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dcp_all as dcp
from integration_tests.demo import training
from integration_tests.demo.corpus import Corpus
from integration_tests.demo.model import sharded_model
from integration_tests.demo.train_state import TrainState

__all__ = ["DemoTrainer"]


class DemoTrainer:
    """FSDP2 and AdamW on Python's help, as `integration_tests.demo.training.train` does it."""

    def __init__(self, root: str) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.checkpoint = f"{root}/checkpoint"
        self.corpus = Corpus()
        self.model = sharded_model(init_device_mesh("cpu", (dist.get_world_size(),)), length=training.LENGTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=training.LEARNING_RATE)
        self.state = TrainState(self.model, self.optimizer)

    def step(self) -> float:
        loss = training._step(self.model, self.optimizer, self.corpus, self.state.steps_done)
        self.state.steps_done += 1
        return loss

    def save(self) -> None:
        dcp.save({"train": self.state}, checkpoint_id=self.checkpoint)

    def restore(self) -> None:
        dcp.load({"train": self.state}, checkpoint_id=self.checkpoint)


class WithoutStep(DemoTrainer):
    """The same, but the number of steps, which decides what is read, is not restored."""

    def restore(self) -> None:
        super().restore()
        self.state.steps_done = 0
