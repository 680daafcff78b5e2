"""Adapter of `LBFGS`, whose state is one history over all parameters and cannot be stored by parameter name."""

from __future__ import annotations

import torch

from dcp_state.adapters import OptimizerAdapter
from dcp_state.errors import UnsupportedOptimizerError

__all__ = ["LbfgsAdapter"]


class LbfgsAdapter(OptimizerAdapter):
    """Adapter that refuses LBFGS; the error message names an alternative."""

    def handles(self, kind: type[torch.optim.Optimizer]) -> bool:
        """Whether the class derives from LBFGS."""
        return issubclass(kind, torch.optim.LBFGS)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `UnsupportedOptimizerError` for every LBFGS optimizer."""
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} keeps one history for all parameters together, which has no names and cannot "
            "be resharded; save `optimizer.state_dict()` as it is, for a resume with the same parameters"
        )
