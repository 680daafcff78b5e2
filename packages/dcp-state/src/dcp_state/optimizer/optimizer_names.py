"""Names of an optimizer's parameters, which may belong to several pipeline stages of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from dcp_state.adapters import ModuleAdapter
from dcp_state.canonical_names import ModelNames
from dcp_state.errors import UnknownParameterError

__all__ = ["OptimizerNames", "optimizer_names"]


@dataclass(slots=True)
class OptimizerNames:
    """Names of parameters in one or several modules of a model."""

    fqn_of: dict[torch.Tensor, str] = field(default_factory=dict)
    other_names: dict[str, list[str]] = field(default_factory=dict)
    """First FQN of a tied parameter → its other FQNs."""
    joined: dict[torch.Tensor, list[str]] = field(default_factory=dict)
    """Flat parameter (FSDP1) → FQNs of the parameters that it contains."""
    known: set[str] = field(default_factory=set)
    """Every FQN of the model, also those of buffers."""
    owner: tuple[ModuleAdapter, nn.Module, ModelNames] | None = None
    """Adapter with `owns_optimizer_state`, the model that it handles, and the model's names; or None."""

    def fqn(self, parameter: torch.Tensor, group: int, position: int) -> str:
        """Return the FQN of a parameter; `group` and `position` identify it in error messages.

        Raises:
            UnknownParameterError: The model does not hold the parameter.
        """
        found = self.fqn_of.get(parameter)
        if found is None:
            raise UnknownParameterError(
                f"parameter {position} of the optimizer's group {group}, of shape {tuple(parameter.shape)}, is no "
                "parameter of the model; pass the model that the optimizer was made for (all parts of it), and make "
                "optimizers after the model is wrapped"
            )
        return found

    def fqns(self, parameter: torch.Tensor, group: int, position: int) -> list[str]:
        """Return the FQNs of all parameters that a flat parameter contains. Errors: see `fqn`."""
        return self.joined.get(parameter) or [self.fqn(parameter, group, position)]

    def candidates(self, fqn: str) -> list[str]:
        """Return the FQNs under which a parameter's state may have been saved: several for a tied parameter."""
        return [fqn, *self.other_names.get(fqn, ())]


def optimizer_names(parts: Sequence[tuple[nn.Module, ModelNames]]) -> OptimizerNames:
    """Join the names in several modules of a model, such as pipeline stages."""
    joined = OptimizerNames()
    for module, names in parts:
        joined.fqn_of.update(names.fqn_of)
        joined.joined.update(names.joined)
        joined.known.update(names.raw_keys)
        for members in names.joined.values():
            joined.known.update(members)
        for alias, first in names.aliases.items():
            joined.other_names.setdefault(first, []).append(alias)
        for adapter in names.adapters:
            if adapter.owns_optimizer_state:
                joined.owner = (adapter, module, names)
    return joined
