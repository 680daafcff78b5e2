"""A loop that trains a small language model on a stream of documents, which are packed into rows of equal length."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import dcp_all as dcp
from integration_tests.resume.parts import ranks, seed_all, state_of_generators, wrapped

__all__ = ["OMISSIONS", "Language", "ResumableLanguage"]

SHARDS, GLOBAL_ROWS = 7, 4
DOCUMENTS, ROWS, LENGTH, WORDS, ACCUMULATED = 40, 2, 12, 32, 2
OMISSIONS = ("scheduler", "ema", "accumulation", "epoch", "position", "numpy-rng", "torch-rng", "one-rank-rng")


class PackedStream:
    """Tokens of shuffled documents, pass after pass; each rank reads every n-th document of a pass."""

    def __init__(self) -> None:
        self.rank, self.world_size = ranks()
        self.epoch = self.position = 0
        self.left: list[int] = []

    def rows(self) -> tuple[torch.Tensor, list[int]]:
        """The next rows, and the documents that were opened for them."""
        opened = []
        while len(self.left) < ROWS * LENGTH:
            order = torch.randperm(DOCUMENTS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
            mine = order[self.rank :: self.world_size]
            if self.position >= len(mine):
                self.epoch, self.position = self.epoch + 1, 0
                continue
            document = mine[self.position]
            self.position += 1
            opened.append(document)
            self.left += [(document * 7 + place) % WORDS for place in range(5 + document % 6)]
        taken, self.left = self.left[: ROWS * LENGTH], self.left[ROWS * LENGTH :]
        return torch.tensor(taken).view(ROWS, LENGTH), opened


class PackedShards:
    """Rows that were packed beforehand, in shards of unequal sizes; read in the order of a `ResumableStream`."""

    def __init__(self) -> None:
        shards = [
            [[(7 * shard + row + place) % WORDS for place in range(LENGTH)] for row in range(2 + shard % 4)]
            for shard in range(SHARDS)
        ]
        self.data = dcp.ResumableStream(shards, GLOBAL_ROWS, shuffle_buffer=3, transform=torch.tensor, seed=5)
        self.loader = self.data.loader()
        self.batches: Any = None

    def rows(self) -> tuple[torch.Tensor, list[int]]:
        """The next rows; the proof sees by itself which they are."""
        if self.batches is None:
            self.batches = iter(self.loader)
        found: torch.Tensor | None = next(self.batches, None)
        if found is None:
            self.batches = None
            return self.rows()
        return found, []


class Average:
    """An exponential moving average of parameters, as many scripts write it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.shadow

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, tensor in state_dict.items():
            self.shadow[name].copy_(tensor)


class Language:
    """The loop, without one part of its state in the checkpoint if `omit` names it."""

    def __init__(self, root: str, *, omit: str | None = None) -> None:
        self.root, self.omit = root, omit
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Embedding(WORDS, 8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, WORDS)
        )
        self.model: Any = wrapped(self.net) if ranks()[1] > 1 else self.net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        warm_up = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=4)
        decay = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warm_up, decay], milestones=[4])
        self.average = Average(self.net)
        self.stream: Any = PackedStream()
        self.accumulated = 0
        for parameter in self.net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        seed_all(11)

    def step(self) -> dict[str, Any]:
        rows, documents = self.stream.rows()
        hidden = torch.from_numpy(np.random.random(rows.shape) < 0.1)
        logits = self.model(rows.masked_fill(hidden, 0)[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        (loss / ACCUMULATED).backward()
        self.accumulated += 1
        if self.accumulated == ACCUMULATED:
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.average.update(self.net)
            self.optimizer.zero_grad(set_to_none=False)
            self.accumulated = 0
        return {"loss": loss, "samples": documents} if documents else loss

    def _state(self) -> dict[str, Any]:
        values = self._stream_state()
        if self.omit != "accumulation":
            gradients = {name: parameter.grad for name, parameter in self.net.named_parameters()}
            values |= {"gradients": dcp.PerRank(gradients), "accumulated": self.accumulated}
        if self.omit != "ema":
            values["ema"] = self.average
        values["random"] = state_of_generators(self.omit)
        scheduler = None if self.omit == "scheduler" else self.scheduler
        return {"app": dcp.app_state(self.model, self.optimizer, scheduler=scheduler, **values)}

    def _stream_state(self) -> dict[str, Any]:
        own = {"epoch": self.stream.epoch, "position": self.stream.position, "left": self.stream.left}
        if self.omit in ("epoch", "position"):
            del own[self.omit]
        if self.omit == "position":
            del own["left"]
        return {"stream": dcp.PerRank(own)}

    def _set_stream(self, app: Any) -> None:
        for name, value in app["stream"].value.items():
            setattr(self.stream, name, value)

    def save(self) -> None:
        dcp.save(self._state(), checkpoint_id=f"{self.root}/checkpoint")

    def restore(self) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=f"{self.root}/checkpoint")
        self._set_stream(state["app"])
        if self.omit != "accumulation":
            self.accumulated = state["app"]["accumulated"]


class ResumableLanguage(Language):
    """The same on a `ResumableStream`; its epoch and position are left out with `omit="position"`."""

    def __init__(self, root: str, *, omit: str | None = None) -> None:
        super().__init__(root, omit=omit)
        self.stream = PackedShards()

    def _stream_state(self) -> dict[str, Any]:
        return {} if self.omit == "position" else {"stream": self.stream.data}

    def _set_stream(self, app: Any) -> None:
        """Nothing: the stream has its position already."""
