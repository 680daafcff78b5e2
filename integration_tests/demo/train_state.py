"""All that a training run has, as a state dict by name: what `save` and `load` are given.

Parameters and optimizer moments stay DTensors, so that each rank holds and writes only its shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["TrainState"]

MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainState:
    """A model, its AdamW and the number of steps done, as a `Stateful`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        self.model = model
        self.optimizer = optimizer
        self.steps_done = 0

    def state_dict(self) -> dict[str, Any]:
        """The live tensors under the parameters' names; also the template to load into.

        Ranks: every rank; not collective.
        """
        parameters = dict(self.model.named_parameters())
        return {
            "model": parameters,
            "optimizer": {name: self._moments(parameter) for name, parameter in parameters.items()},
            "hyper": [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups],
            "steps_done": self.steps_done,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what is not a tensor; the tensors were read in place."""
        for group, hyper in zip(self.optimizer.param_groups, state_dict["hyper"], strict=True):
            group.update(hyper)
        self.steps_done = state_dict["steps_done"]

    def _moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The optimizer's tensors of one parameter, made as its first step would make them if there are none yet."""
        state: dict[str, torch.Tensor] = self.optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state.update({name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS})
        return state
