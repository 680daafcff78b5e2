"""The training job of the demo: FSDP2, AdamW, a background save every few steps; the loop that a user would write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import dcp_all as dcp
from integration_tests.demo.background import BackgroundSaves
from integration_tests.demo.corpus import Corpus
from integration_tests.demo.fingerprint import fingerprints
from integration_tests.demo.libraries import time_loads, time_saves
from integration_tests.demo.model import sharded_model
from integration_tests.demo.train_state import TrainState

__all__ = ["train"]

ROWS, LENGTH = 4, 128
LEARNING_RATE = 3e-4


def train(
    say: Callable[..., None],
    *,
    steps: int,
    checkpoint: Path,
    save_at: Sequence[int] = (),
    resume: bool = False,
    bench: Path | None = None,
) -> None:
    """Train up to `steps` steps done in all, saving after each number of steps in `save_at`.

    Args:
        say: reports an event.
        steps: steps done at the end, those before a resume included.
        checkpoint: where to save, and where to resume from.
        save_at: after how many steps to save; each save replaces the one before.
        resume: begin from the checkpoint.
        bench: if given, a folder in which both libraries' saves and loads of the final state are timed.

    Ranks: every rank; collective.
    """
    corpus = Corpus()
    model = sharded_model(init_device_mesh("cpu", (dist.get_world_size(),)), length=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    state = TrainState(model, optimizer)
    say("ready", parameters=sum(parameter.numel() for parameter in model.parameters()))
    if resume:
        seconds = _timed(lambda: dcp.load({"train": state}, checkpoint_id=checkpoint))
        say("restored", steps_done=state.steps_done, seconds=seconds, fingerprints=fingerprints(state.state_dict()))
    with BackgroundSaves(say, checkpoint, warm=bool(save_at)) as saves:
        while state.steps_done < steps:
            loss = _step(model, optimizer, corpus, state.steps_done)
            state.steps_done += 1
            say("step", steps_done=state.steps_done, loss=loss)
            saves.look(state.steps_done)
            if state.steps_done in save_at:
                saves.start(state)
    if bench is not None:
        for operation in (time_saves, time_loads):
            times = operation({"train": state}, bench)
            say("times", operation=operation.__name__, times=[asdict(each) for each in times])


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, corpus: Corpus, step: int) -> float:
    """One step of all ranks; the mean loss over the whole batch, before the step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = corpus.batch(step, rows=ROWS, length=LENGTH, rank=rank, world_size=world_size)
    logits = model(rows[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    mean = loss.detach().double() / world_size
    dist.all_reduce(mean)
    return mean.item()


def _timed(operation: Callable[[], Any]) -> float:
    start = time.perf_counter()
    operation()
    dist.barrier()
    return time.perf_counter() - start
