"""Adapter of FSDP2 (`fully_shard`), which has no wrapper module; parameters are DTensors while they are sharded.

Between forward and backward a module may have unsharded parameters, which are not the optimizer's parameters.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dcp_state.adapters import ModuleAdapter

__all__ = ["Fsdp2Adapter"]


class Fsdp2Adapter(ModuleAdapter):
    """Adapter that reshards modules before the names of their parameters are determined."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """Whether `fully_shard` changed the module's class."""
        return issubclass(kind, FSDPModule)

    def prepare(self, module: nn.Module) -> None:
        """Reshard the module's parameters, as the module's own `state_dict` does."""
        if isinstance(module, FSDPModule):
            module.reshard()
