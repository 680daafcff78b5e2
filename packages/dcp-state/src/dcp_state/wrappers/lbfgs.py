"""Adapter of `LBFGS`: its state is one history over all parameters, so it cannot be stored by name."""

from __future__ import annotations

import torch

from dcp_state.adapters import OptimizerAdapter
from dcp_state.errors import UnsupportedOptimizerError

__all__ = ["LbfgsAdapter"]


class LbfgsAdapter(OptimizerAdapter):
    """Refuses LBFGS, with an alternative in the message."""

    def handles(self, kind: type[torch.optim.Optimizer]) -> bool:
        """Whether the class derives from LBFGS."""
        return issubclass(kind, torch.optim.LBFGS)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `UnsupportedOptimizerError`, always."""
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} keeps one history for all parameters together, which has no names and cannot "
            "be resharded; save `optimizer.state_dict()` as it is, for a resume with the same parameters"
        )
