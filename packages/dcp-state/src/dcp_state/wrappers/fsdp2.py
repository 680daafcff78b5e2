"""Adapter of FSDP2 (`fully_shard`): no wrapper and no prefix; parameters are DTensors while they are sharded.

Between forward and backward a module may have its unsharded parameters, which are not those of the optimizer.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dcp_state.adapters import ModuleAdapter

__all__ = ["Fsdp2Adapter"]


class Fsdp2Adapter(ModuleAdapter):
    """Reshards modules, so that parameters are the sharded ones."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """Whether `fully_shard` changed the module's class."""
        return issubclass(kind, FSDPModule)

    def prepare(self, module: nn.Module) -> None:
        """Reshard, as the module's own `state_dict` would."""
        if isinstance(module, FSDPModule):
            module.reshard()
